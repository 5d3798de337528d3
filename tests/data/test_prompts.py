"""Prompts of every container are those of plain Python objects."""

import datetime
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_rows import written

from lit_rlsched.data import rows as rows_module
from lit_rlsched.data import tokenizing
from lit_rlsched.data.prompts import Prompts, make_prompts, tokenize
from lit_rlsched.data.rows import load_rows
from lit_rlsched.data.source import DomainSource, PromptSource
from lit_rlsched.types import Prompt, stable_hash

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


@pytest.mark.parametrize("batch", [3, 1000])
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
    uids = [p.uid for p in expected]
    assert ours.state_dict()["fingerprint"] == f"{len(uids)} prompts, {stable_hash(*uids):016x}"


def test_values_that_json_would_change_stay_as_they_are(tokenizer: Any) -> None:
    odd = [(1, 2), {3: 4}, np.float64(0.5), datetime.date(2024, 1, 1), b"bytes", float("nan")]
    rows = [{"prompt": f"{i}", "uid": i, "odd": value} for i, value in enumerate(odd)]
    prompts = make_prompts(rows, tokenizer, max_prompt_length=64)
    assert [p.columns["odd"] for p in prompts] == odd
    assert [type(p.columns["odd"]) for p in prompts] == list(map(type, odd))


@pytest.mark.parametrize("odd", ["text", "chat messages"])
def test_prompts_of_two_forms_are_warned_of(odd: str, tokenizer: Any) -> None:
    chats = [{"prompt": [{"role": "user", "content": str(i)}], "answer": i} for i in range(5)]
    rows = [{"prompt": f"{i}+1", "answer": i} for i in range(5)]
    if odd == "text":
        rows, chats = chats, rows
    rows[3] = chats[3]
    said = rf"1 of 5 prompts are {odd} and the others are not \(the first is row 3\)"
    with pytest.warns(UserWarning, match=said):
        make_prompts(rows, tokenizer, max_prompt_length=400)


def test_dates_of_a_parquet_file_stay_dates(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1", "on": datetime.datetime(2024, 1, 1), "raw": b"x", "empty": None}]
    (prompt,) = make_prompts(
        load_rows(written(tmp_path, "parquet", rows)), tokenizer, max_prompt_length=64
    )
    assert prompt.columns == {name: rows[0][name] for name in ("on", "raw", "empty")}


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
