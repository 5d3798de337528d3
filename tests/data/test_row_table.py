"""Rows and prompts in memory-mapped Arrow are those that plain Python objects would be."""

import datetime
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from written_rows import written

from lit_rlsched.data import prompts as prompts_module
from lit_rlsched.data import rows as rows_module
from lit_rlsched.data import tokenizing
from lit_rlsched.data.prompts import Prompts, make_prompts, tokenize
from lit_rlsched.data.row_table import UidIndex, cache_folder, fingerprint, mapped
from lit_rlsched.data.rows import load_rows
from lit_rlsched.data.source import DomainSource, PromptSource
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Prompt, stable_hash

pytestmark = pytest.mark.usefixtures("own_cache")

CHAT = [{"role": "user", "content": "2+2"}]
EVEN = [
    {"prompt": "1+1", "uid": "seven", "answer": "2", "level": 1.5},
    {"prompt": "2+2", "uid": None, "answer": "4", "level": None},
    {"prompt": "1+1", "uid": None, "answer": "11", "level": 0.1},
    {"prompt": "2+2", "uid": None, "answer": "4", "level": None},
]
"""All with the same columns of one type each, as Arrow has them; the last repeats the second."""
RAGGED = [
    {"prompt": "1+1", "answer": 2, "metadata": {"a": [1, 2]}},
    {"prompt": CHAT, "answer": "four", "metadata": {"b": None}},
    {"answer": True, "prompt": "9", "uid": 9},
    {"prompt": "\u00e9 1", "answer": 1e300, "big": 2**80, "text": "\ud83d"},
    {"prompt": "1+1", "answer": 2, "metadata": {"a": [1, 2]}},
]


def plain_prompts(rows: list[dict[str, Any]], tokenizer: Any) -> list[Prompt]:
    """What the prompts of these rows are, one Python object after the other."""
    prompts: dict[str, Prompt] = {}
    for row in rows:
        named = {name: value for name, value in row.items() if name != "uid"}
        hashed = f"{stable_hash(json.dumps(named, sort_keys=True)):016x}"
        uid = hashed if row.get("uid") is None else str(row["uid"])
        if isinstance(row["prompt"], str):
            ids = tokenizer(text=row["prompt"])["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        columns = {name: value for name, value in named.items() if name != "prompt"}
        prompts.setdefault(uid, Prompt(uid, row["prompt"], tuple(ids), columns))
    return list(prompts.values())


KINDS = ["jsonl", "json", "parquet", "saved", "dataset", "selected", "list"]


@pytest.mark.parametrize("batch", [1, 3, 1000])
@pytest.mark.parametrize(
    ("kind", "rows"),
    [*((kind, EVEN) for kind in KINDS), *((kind, RAGGED) for kind in ("jsonl", "json", "list"))],
)
def test_prompts_of_every_container_are_those_of_plain_objects(
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    rows: list[dict[str, Any]],
    batch: int,
) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH", batch)
    monkeypatch.setattr(rows_module, "BATCH", batch)
    expected = plain_prompts(rows, tokenizer)
    for _ in range(2):  # the second time from the cache
        table = load_rows(written(tmp_path, kind, rows))
        assert list(table) == rows and [table[i] for i in range(len(table))] == rows
        with pytest.warns(UserWarning, match=f"1 of {len(rows)} rows repeat an earlier row"):
            prompts = make_prompts(table, tokenizer, max_prompt_length=64)
        assert list(prompts) == prompts[:] == expected
        assert [list(p.columns) for p in prompts] == [list(p.columns) for p in expected]
        assert prompts.lengths.tolist() == [len(p.token_ids) for p in expected]
        assert [prompts.of_uid(p.uid) for p in expected[::-1]] == expected[::-1]
        ours, theirs = PromptSource(prompts, seed=3), PromptSource(expected, seed=3)
        assert [ours.draw(2) for _ in range(5)] == [theirs.draw(2) for _ in range(5)]
        assert ours.state_dict() == theirs.state_dict()


def test_values_that_json_would_change_stay_as_they_are(tokenizer: Any) -> None:
    odd = [(1, 2), {3: 4}, np.float64(0.5), datetime.date(2024, 1, 1), b"bytes", float("nan")]
    rows = [{"prompt": f"{i}", "uid": i, "odd": value} for i, value in enumerate(odd)]
    prompts = make_prompts(rows, tokenizer, max_prompt_length=64)
    assert [p.columns["odd"] for p in prompts] == odd
    assert [type(p.columns["odd"]) for p in prompts] == list(map(type, odd))


@pytest.mark.parametrize("kind", ["jsonl", "list"])
@pytest.mark.parametrize("odd", ["text", "chat messages", None])
def test_prompts_of_two_forms_are_warned_of_also_when_the_cache_knows_them(
    odd: str | None, kind: str, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1", "answer": i} for i in range(5)]
    if odd != "text":
        rows[3]["prompt"] = CHAT
    if odd != "chat messages":
        rows = [
            {**row, "prompt": [{"role": "user", "content": str(i)}]} for i, row in enumerate(rows)
        ]
    if odd == "text":
        rows[3]["prompt"] = "3+1"
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make_prompts(load_rows(written(tmp_path, kind, rows)), tokenizer, max_prompt_length=400)
        said = [str(w.message) for w in told if "others are not" in str(w.message)]
        assert len(said) == (odd is not None)
        assert not said or (f"1 of 5 prompts are {odd} and" in said[0] and "is row 3)" in said[0])


def test_dates_of_a_parquet_file_stay_dates(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1", "on": datetime.datetime(2024, 1, 1), "raw": b"x", "empty": None}]
    (prompt,) = make_prompts(
        load_rows(written(tmp_path, "parquet", rows)), tokenizer, max_prompt_length=64
    )
    assert prompt.columns == {name: rows[0][name] for name in ("on", "raw", "empty")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_reads_and_tokenises_nothing(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    calls = []
    for module, name in ((tokenizing, "_token_batch"), (rows_module, "record_batch")):
        original = getattr(module, name)

        def spy(*args: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            return _original(*args)

        monkeypatch.setattr(module, name, spy)
    spec = written(tmp_path, kind, EVEN[:3])

    def begin(template: str = tokenizer.chat_template, **settings: Any) -> list[Prompt]:
        calls.clear()
        again = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        again.chat_template = template
        return make_prompts(
            load_rows(spec), again, max_prompt_length=64, chat_template_kwargs=settings
        )[:]

    first = begin()
    assert calls == ["record_batch", "_token_batch"]
    assert begin() == first and not calls
    assert begin("{# another #}") == first and calls == ["_token_batch"]
    assert begin(enable_thinking=False) == first and calls == ["_token_batch"]
    assert begin() == first and not calls
    monkeypatch.setattr(prompts_module, "version", lambda name: "newer")
    assert begin() == first and calls == ["_token_batch"]
    assert not list(cache_folder().glob("*.unfinished"))


def test_a_template_with_the_date_is_tokenised_once_a_day(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d') }}"
    rows = load_rows([{"prompt": CHAT}])

    class Later(datetime.date):
        @classmethod
        def today(cls) -> "Later":
            return cls(1999, 1, 1)

    today = prompts_module._key(rows, tokenizer, tokenizer.chat_template, {})
    assert prompts_module._key(rows, tokenizer, tokenizer.chat_template, {}) == today
    monkeypatch.setattr(prompts_module, "date", Later)
    assert prompts_module._key(rows, tokenizer, tokenizer.chat_template, {}) != today


def test_a_changed_file_is_read_again_and_its_cursor_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    path, rows = tmp_path / "rows.jsonl", [{"prompt": "1", "answer": i} for i in range(4)]

    def source(rows: list[dict[str, Any]]) -> PromptSource:
        path.write_text("\n".join(map(json.dumps, rows)))
        return PromptSource(make_prompts(load_rows(path), tokenizer, max_prompt_length=9), seed=0)

    state = source(rows).state_dict()
    source(rows).load_state_dict(state)
    rows[2]["answer"] = 7
    with pytest.raises(UsageError, match="another data set"):
        source(rows).load_state_dict(state)


def test_processes_that_start_together_write_once() -> None:
    written_by, together = [], threading.Barrier(4)

    def batches() -> Iterator[pa.RecordBatch]:
        written_by.append(threading.get_ident())
        yield pa.record_batch({"x": [1, 2, 3]})

    def begin(results: list[pa.Table]) -> None:
        together.wait()
        results.append(mapped("key", batches))

    results: list[pa.Table] = []
    threads = [threading.Thread(target=begin, args=[results]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written_by) == 1 and len(results) == 4
    assert all(table.to_pydict() == {"x": [1, 2, 3]} for table in results)


def test_without_a_cache_that_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    for number in (1, 2):
        table = mapped("key", lambda: iter([pa.record_batch({"x": [number]})]))  # noqa: B023
        assert table.to_pydict() == {"x": [number]}


def test_an_error_while_writing_leaves_no_file() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"x": [1]})
        raise ValueError("bad row")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad row"):
            mapped("key", broken)
    assert mapped("key", lambda: iter([pa.record_batch({"x": [2]})])).to_pydict() == {"x": [2]}


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=4), min_size=1, unique=True))
def test_uids_are_found_and_fingerprinted(uids: list[str]) -> None:
    array = pa.array(uids, pa.string())
    index = UidIndex(array)
    assert [index[uid] for uid in uids] == list(range(len(uids)))
    assert "\x00 none of them" not in index
    with pytest.raises(KeyError):
        index["\x00 none of them"]
    assert fingerprint(array) == f"{len(uids)} prompts, {stable_hash(*uids):016x}"


def test_a_fingerprint_of_several_batches() -> None:
    uids = [f"uid {i}" for i in range(2500)]
    assert fingerprint(pa.array(uids)) == f"2500 prompts, {stable_hash(*uids):016x}"


def test_held_out_prompts_among_the_training_prompts_are_counted(tokenizer: Any) -> None:
    train = [{"prompt": f"{i}", "answer": "a"} for i in range(40)]
    val = [{"prompt": p} for p in ("x", "7", "39", "40", "7 ")]
    rows = {"train": load_rows(train), "val": load_rows(val)}
    settings: dict[str, Any] = {"context": 64, "max_completion_length": 8}
    with pytest.warns(UserWarning, match=r"2 prompts of `val_data` are in `train_data`.*'7'"):
        sets = tokenize(rows, tokenizer, chat_template_kwargs=None, **settings)
    assert (sets.longest, sets.shortest, len(sets)) == (2, 1, 45)
    assert [p.text for p in sets.first(41)] == [*(r["prompt"] for r in train), "x"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenize({"val": rows["val"]}, tokenizer, chat_template_kwargs=None, **settings)


def test_domains_of_mapped_prompts_are_drawn_like_those_of_a_list(tokenizer: Any) -> None:
    rows = [{"prompt": f"{i}", "uid": i, "domain": "xyz"[i % 3]} for i in range(20)]
    prompts = make_prompts(rows, tokenizer, max_prompt_length=9)
    assert isinstance(prompts, Prompts)
    ours, theirs = (
        DomainSource(of, 5, True, lambda prompt: prompt.columns["domain"])
        for of in (prompts, list(prompts))
    )
    assert list(ours.domains) == list(theirs.domains) == ["x", "y", "z"]
    for domain in "xyzzyx":
        taken = [draw.prompt.uid for draw in ours.draw(2, ["0", "1"], domain)]
        assert taken == [draw.prompt.uid for draw in theirs.draw(2, ["0", "1"], domain)]
        assert ours.left(["0", "1"], domain) == theirs.left(["0", "1"], domain)
    assert ours.state_dict() == theirs.state_dict()
