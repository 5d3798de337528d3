"""Whatever is wrong with data, the error names the file, and the row and column if one is."""

import json
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_rlsched.data import rows as rows_module
from lit_rlsched.data.rows import load_rows
from lit_rlsched.settings import UsageError

ROWS = [{"prompt": f"{n}+1=", "answer": str(n), "more": {"n": [n]}} for n in range(20)]
DIGITS, DEEP = "1" * 5000, "[" * 2000 + "]" * 2000


def write_folder(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "folder": write_folder,
}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*WRITERS]),
    at=st.floats(0, 1),
    damage=st.sampled_from(["cut", "zeros", "noise", "repeated", "empty"]),
    part=st.integers(0, 9),
)
def test_a_damaged_file_is_read_or_named(
    tmp_path: Path, name: str, at: float, damage: str, part: int
) -> None:
    path = tmp_path / name
    if not path.exists():
        WRITERS[name](path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file = files[part % len(files)]
    whole = file.read_bytes()
    place = int(at * len(whole))
    spoiled = {
        "cut": whole[:place],
        "zeros": whole[:place] + bytes(40) + whole[place + 40 :],
        "noise": whole[:place] + b"\xff\x00[{\x80" + whole[place + 5 :],
        "repeated": whole[:place] + whole[: place // 2] + whole[place:],
        "empty": b"",
    }
    file.write_bytes(spoiled[damage])
    try:
        assert all("prompt" in row for row in load_rows(str(path)))
    except UsageError as error:
        assert str(path) in str(error)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f'{{"prompt": "a", "n": {DIGITS}}}', "digits"),
        (f'{{"prompt": "a", "n": {DEEP}}}', "nested too deeply"),
        ('{"prompt": "a", "prompt": "b"}', "the key `prompt` twice"),
        ('{"prompt": "a", "uid": "\\ud800"}', "`uid` that is no text"),
    ],
    ids=["digits", "deep", "twice", "uid"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_row_that_python_cannot_hold_is_named(
    tmp_path: Path, line: str, said: str, suffix: str
) -> None:
    lines = [json.dumps(row) for row in ROWS[:3]] + [line]
    path = tmp_path / f"a{suffix}"
    path.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    where = "" if suffix == ".json" else "(line 4|[Rr]ow 3)"
    with pytest.raises(UsageError, match=rf"a\{suffix}`.*{where}.*{said}"):
        load_rows(str(path))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: 10**5000, "digits"),
        (lambda: nested(2000), "nested too deeply"),
        (threading.Lock, "pickle"),
    ],
)
def test_a_row_of_a_list_is_named(make: Callable[[], Any], said: str) -> None:
    rows = [{"prompt": f"p{n}", "uid": str(n), "x": make() if n == 2 else 0} for n in range(4)]
    with pytest.raises(UsageError, match=rf"`rows`, row 2 .*{said}"):
        load_rows(rows)


def test_what_is_wrong_in_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    two = pa.table([["a"], ["b"], ["c"]], names=["prompt", "x", "x"])
    pq.write_table(two, path)
    with pytest.raises(UsageError, match=r"a\.parquet` has two columns `x`"):
        load_rows(str(path))
    years = pa.array([0, 10**18], pa.timestamp("us"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "when": years}), path)
    with pytest.raises(UsageError, match=r"a\.parquet`, row 1 .*cannot be read"):
        load_rows(str(path))


def test_rows_of_a_stream_are_named() -> None:
    def rows():
        yield {"prompt": "a"}
        raise OSError("the disk is gone")

    with pytest.raises(UsageError, match=r"`IterableDataset`, row 1 .*the disk is gone"):
        load_rows(datasets.IterableDataset.from_generator(rows))


def test_a_stream_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MOST_STREAMED", 9)
    endless = datasets.IterableDataset.from_generator(lambda: ({"prompt": str(i)} for i in count()))
    with pytest.raises(UsageError, match=r"more than 9 rows.*`stream\.take"):
        load_rows(endless)
    assert len(load_rows(endless.take(9))) == 9
