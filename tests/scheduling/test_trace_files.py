import os
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lit_rlsched.scheduling import trace_files
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.scheduling.trace_files import MERGED, TABLES, Traces, TraceWriter, parts_of
from lit_rlsched.settings import UsageError


def tables_of(number: int) -> dict[str, pa.Table]:
    """Rows of a round; those of some rounds have a table or a column less."""
    rows = {"value": [number * 10 + i for i in range(1 + number % 3)]}
    rounds = pa.table({"version": [number]})
    tables = {"steps": rounds[:0], "spans": pa.table(rows), "rounds": rounds}
    if number % 4 == 0:
        tables["intervals"] = pa.table({"start": [number], "more": [str(number)]})
        tables["rounds"] = tables["rounds"].append_column("slots", [[number]])
    return tables


def expected(rounds) -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {name: [] for name in TABLES}
    for number in rounds:
        for name, table in tables_of(number).items():
            rows[name] += [{"round": number, **row} for row in table.to_pylist()]
    return rows


def read(folder: Path) -> dict[str, list[dict]]:
    """All rows, without the columns that other rounds have."""
    traces = Traces(folder)
    return {
        name: [{k: v for k, v in row.items() if v is not None} for row in traces.rows(name)]
        for name in TABLES
    }


class Killed(BaseException):
    pass


def test_rounds_come_back_in_order_however_many_are_merged(tmp_path):
    writer = TraceWriter(tmp_path / "traces")
    writer.begin(0, {"model": "m"})
    for number in range(3 * MERGED + 4):
        writer.add(number, tables_of(number))
        if number % 7 == 0 or number >= 3 * MERGED:
            assert read(tmp_path) == expected(range(number + 1))
    files = {name: len(parts_of(tmp_path / "traces" / name)) for name in TABLES}
    assert files == {"rounds": 7, "spans": 7, "intervals": 25, "completions": 0, "steps": 0}
    traces = Traces(tmp_path)
    assert traces.about["model"] == "m" == Traces(tmp_path / "traces").about["model"]
    assert traces.table("spans").column_names == ["round", "value"]
    # without completions nothing says which rounds are new
    assert traces.newest(1).rows("rounds") == traces.rows("rounds")


def test_a_file_that_a_merged_one_covers_is_left_out(tmp_path):
    folder = tmp_path / "run" / "spans"
    TraceWriter(folder.parent).add(5, tables_of(5))
    for name in ("000001-000004", "000002-000003", "000004-000004", "6-7x", "x6-7"):
        (folder / f"{name}.parquet").touch()
    assert [part[:2] for part in parts_of(folder)] == [(1, 4), (5, 5)]


@pytest.mark.mostly_slow("0", "3", "7")
@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_write_loses_no_earlier_round_and_a_resume_goes_on(
    tmp_path, monkeypatch, seed
):
    """Killed before or after any rename or deletion, and resumed from any earlier round."""
    chance, folder = random.Random(seed), tmp_path / "run" / "traces"
    monkeypatch.setattr(trace_files, "MERGED", 5)
    replace, unlink, left = os.replace, Path.unlink, [0]

    def counted(operation):
        def run(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and chance.random() < 0.5:
                raise Killed
            operation(*args, **kwargs)
            if left[0] == 0:
                raise Killed

        return run

    monkeypatch.setattr(trace_files.os, "replace", counted(replace))
    monkeypatch.setattr(Path, "unlink", counted(unlink))
    done, number = 0, 1
    for _ in range(40):
        left[0], done = chance.randint(1, 60), number - 1
        try:
            writer = TraceWriter(folder)
            writer.begin(number, {})
            while True:
                writer.add(number, tables_of(number))
                done, number = number, number + 1
        except Killed:
            pass
        left[0] = 0
        if (folder / "about.json").exists():
            found = read(folder)
            for name, rows in expected(range(1, done + 1)).items():
                assert [row for row in found[name] if row["round"] <= done] == rows
        number = chance.randint(1, done + 1)
    left[0] = 0
    (folder / "spans" / ".unfinished.tmp").touch()
    TraceWriter(folder).begin(number, {})
    assert read(folder) == expected(range(1, number))
    assert not [*folder.rglob("*.tmp")]
    parts = [part for name in TABLES for part in parts_of(folder / name)]
    assert all(part.first <= part.last < number for part in parts)


def test_the_oldest_rounds_are_deleted_first(tmp_path):
    """As many files as must go, but not the newest of a table, and none of a small table."""
    for number in range(1, 40):
        TraceWriter(tmp_path).add(number, tables_of(number))

    def files():
        parts = [part for name in ("spans", "intervals") for part in parts_of(tmp_path / name)]
        return [part.path for part in sorted(parts, key=lambda part: part.last)]

    left = files()
    newest, rounds = [left[-1], left[-4]], [*(tmp_path / "rounds").iterdir()]
    assert {path.parent.name for path in newest} == {"spans", "intervals"}
    while old := [path for path in left if path not in newest]:
        size = sum(path.stat().st_size for path in left)
        TraceWriter(tmp_path, size).add(0, {})
        assert files() == left
        TraceWriter(tmp_path, size - old[0].stat().st_size - 1).add(0, {})
        left = [path for path in left if path not in old[:2]]
        assert files() == left
    TraceWriter(tmp_path, 0).add(0, {})
    assert files() == left and [*(tmp_path / "rounds").iterdir()] == rounds


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"holds no traces\. Give the folder of a run"):
        Traces(tmp_path)
    writer = TraceWriter(tmp_path / "traces")
    writer.begin(1, {})
    Traces(tmp_path).check()  # nothing is missing where there are no rows
    writer.add(1, tables_of(1))
    with pytest.raises(UsageError, match="rounds` has no column `clock`"):
        Traces(tmp_path).check()
    path = tmp_path / "traces" / "spans" / "000001-000001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"000001-000001.parquet` cannot be read: .* rounds 1 to"):
        Traces(tmp_path).rows("spans")
    shutil.copy(__file__, path)
    with pytest.raises(UsageError, match="cannot be read"):
        Traces(tmp_path).rows("spans")
    for text, why in (("{", "damaged"), ("[1]", "damaged"), ('{"format": 9}', "format 9")):
        (tmp_path / "traces" / "about.json").write_text(text)
        with pytest.raises(UsageError, match=why):
            Traces(tmp_path)


@pytest.mark.parametrize("engines", [1, 2])
def test_windows_are_sums_over_the_steps_of_an_engine(engines):
    trace, chance = RolloutTrace(4 * engines, engines=engines), np.random.default_rng(engines)
    now = [0.0] * engines
    for turn in range(400):
        steps = {}
        for engine in range(engines):
            if turn and chance.random() < 0.2:
                continue
            start = now[engine] + 0.5
            now[engine] = start + 1 + chance.random()
            steps[engine] = Step(start, now[engine], 2, int(chance.integers(99)), 1 + turn % 2, 3)
            if not turn:
                steps[engine].admitted = [f"{engine}/0"]
        if steps:
            trace.take_engine_step(steps)
    columns = {name: np.array(column) for name, column in trace.steps.items()}
    real = columns["decode_steps"] > 0
    for most, windows in ((1, trace.windows(1)), (7, trace.windows(7)), (256, trace.windows())):
        assert max(np.bincount(windows["engine"])) == most
        for name in ("kv_tokens", "prefill_tokens", "decode_steps"):
            steps = columns["decode_steps"] if name == "kv_tokens" else 1
            assert windows[name].sum() == (columns[name] * steps)[real].sum()
        assert windows["steps"].sum() == real.sum()
        assert windows["seconds"].sum() == pytest.approx(
            (columns["end"] - columns["start"])[real].sum()
        )
        assert (windows["end"] - windows["start"] >= windows["seconds"] - 1e-9).all()
    assert RolloutTrace(4).windows()["seconds"].size == 0


def test_columns_have_the_same_types_whatever_a_round_decoded():
    types = []
    for ran in (0, 1):
        trace = RolloutTrace(1)
        trace.take(Step(1, 2, ran, ran, ran, admitted="a"))
        types.append({name: column.dtype for name, column in trace.windows().items()})
    assert types[0] == types[1]
