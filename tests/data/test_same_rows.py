"""The same rows in every form in which a user may give them, as `datasets` itself reads them."""

import json
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from PIL import Image
from written_rows import written

from lit_rlsched.data.messages import normalized
from lit_rlsched.data.rows import load_rows, row_uid
from lit_rlsched.data.tasks import HubDataset
from lit_rlsched.settings import UsageError

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
PROMPT = TEXT.map(lambda text: f"{text}?")
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
MESSAGES = st.builds(
    lambda turns, name: [
        {"role": role, "content": text, **({"name": name} if name and not i else {})}
        for i, (role, text) in enumerate(turns)
    ],
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), PROMPT), min_size=1, max_size=3),
    st.none() | TEXT,
)


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows with the same columns, of which each has values of one type or of many."""
    prompts = draw(st.sampled_from([PROMPT, MESSAGES]))
    scalars = st.sampled_from([st.none() | st.integers(-9, 9), st.none() | TEXT, st.floats(-9, 9)])
    one = draw(scalars)
    columns = draw(
        st.fixed_dictionaries(
            {"prompt": st.just(prompts), "answer": st.just(one)},
            optional={
                "listed": st.just(st.lists(one, max_size=2)),
                "nested": st.just(st.fixed_dictionaries({"a": one, "b": st.lists(one)})),
                "mixed": st.just(VALUES),
            },
        )
    )
    return draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=4))


def forms(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows as files, folders and data sets."""
    try:
        data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    except pa.ArrowException:  # `datasets` cannot hold some lists of a float and a text
        reject()
    data.to_parquet(str(folder / "rows.parquet"))
    data.save_to_disk(str(folder / "saved"))
    half = len(rows) // 2
    parts = [data.select(range(half)), data.select(range(half, len(rows)))]
    return {
        "list": rows,
        "tuple": tuple(rows),
        "jsonl": written(folder, "jsonl", rows),
        "json": written(folder, "json", rows),
        "parquet": str(folder / "rows.parquet"),
        "saved": str(folder / "saved"),
        "dataset": data,
        "splits": datasets.DatasetDict({"test": parts[0], "train": data}),
        "selected": data.select(range(len(rows))[::-1]).select(range(len(rows))[::-1]),
        "concatenated": datasets.concatenate_datasets(parts),
        "filtered": data.filter(bool, keep_in_memory=True),
        "numpy": data.with_format("numpy"),
        "torch": data.with_format("torch"),
        "transform": data.with_transform(dict),
        "stream": data.to_iterable_dataset(),
        "stream of tensors": data.with_format("torch").to_iterable_dataset(),
    }


@settings(max_examples=max(8, settings().max_examples // 4))  # half a second each
@given(rows=tables())
def test_every_form_gives_the_same_rows(rows: list[dict[str, Any]]) -> None:
    datasets.disable_progress_bars()
    with TemporaryDirectory() as folder:
        given_as = forms(Path(folder), rows)
        shown = [normalized(row) for row in given_as["dataset"]]
        if "mixed" not in rows[0]:  # where Arrow gives a dict every key that another one has
            assert shown == rows
        for name, form in given_as.items():
            expected = rows if name in ("list", "tuple", "jsonl", "json") else shown
            table = load_rows(form)
            assert [*table] == [table[i] for i in range(len(rows))] == expected, name
            assert table.uids == [row_uid(row, 0) for row in expected], name


def test_columns_that_a_row_lacks_are_none_where_the_form_has_them() -> None:
    rows = [{"prompt": "a", "x": 1}, {"prompt": "b"}]
    assert [*load_rows(rows)] == rows
    data = datasets.Dataset.from_list(rows)
    assert [*load_rows(data)] == [*data] == [{"prompt": "a", "x": 1}, {"prompt": "b", "x": None}]


@pytest.mark.parametrize("kind", ["dataset", "hub"])
def test_a_data_set_is_read_through_its_transform(kind: str, monkeypatch: Any) -> None:
    data = datasets.Dataset.from_dict({"question": ["x", "y", "z"], "n": [1, 2, 3]})

    def asked(batch: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": [f"ask {q}" for q in batch["question"]], "n": np.array(batch["n"])}

    shown = data.shuffle(seed=1).with_transform(asked)
    if kind == "hub":
        prompted = data.rename_column("question", "prompt").with_transform(
            lambda batch: asked({"question": batch["prompt"], "n": batch["n"]})
        )
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: prompted)
        assert [row["prompt"] for row in load_rows(HubDataset("a/b"))] == [
            "ask x",
            "ask y",
            "ask z",
        ]
        return
    assert [*load_rows(shown)] == [*shown] and shown[0]["prompt"].startswith("ask")
    data.set_transform(lambda batch: {"n": batch["n"]})
    with pytest.raises(
        UsageError, match=r"row 0 .* no column `prompt`, or an empty one; its columns are \['n'\]"
    ):
        load_rows(data)


def test_formats_hide_columns_as_the_data_set_does() -> None:
    data = datasets.Dataset.from_dict({"prompt": ["a"], "x": [1], "y": [2]})
    hidden = data.with_format("torch", columns=["prompt", "y"])
    assert [*load_rows(hidden)] == [{"prompt": "a", "y": 2}]
    shown = data.with_format("torch", columns=["y"], output_all_columns=True)
    assert [*load_rows(shown)] == [{"prompt": "a", "x": 1, "y": 2}]


def test_what_json_cannot_hold_beside_what_datasets_decodes() -> None:
    features = datasets.Features(
        prompt=datasets.Value("string"), day=datasets.Value("date32"), any=datasets.Json()
    )
    day = date(2024, 1, 1)
    data = datasets.Dataset.from_dict(
        {"prompt": ["a", "b"], "day": [day, None], "any": [{"k": 1}, "t"]}, features=features
    )
    assert [*load_rows(data)] == [*data] and load_rows(data)[0]["any"] == {"k": 1}


PICTURE = Image.new("RGB", (2, 2))
PICTURED = datasets.Features(prompt=datasets.Value("string"), image=datasets.Image())


@pytest.mark.parametrize("kind", ["list", "dataset", "parquet", "stream", "chat"])
@pytest.mark.parametrize("name", ["image", "images", "video", "audio"])
def test_rows_with_images_and_sounds_are_refused_by_name(
    tmp_path: Path, kind: str, name: str
) -> None:
    rows = [{"prompt": "a", name: None}, {"prompt": "b", name: PICTURE}]
    if kind == "chat":
        rows[1] = {"prompt": [{"role": "user", "content": "b"}], name: [PICTURE]}
    spec: Any = rows
    if kind in ("dataset", "parquet", "stream"):
        columns = {"prompt": ["a", "b"], "image": [None, PICTURE]}
        spec = datasets.Dataset.from_dict(columns, features=PICTURED)
        spec = spec.rename_column("image", name) if name != "image" else spec
    if kind == "parquet":
        spec.to_parquet(str(tmp_path / "p.parquet"))
        spec = str(tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=rf"row 1 .*has `{name}`, and training is on text alone"):
        load_rows(spec.to_iterable_dataset() if kind == "stream" else spec)
    assert load_rows([rows[0], {"prompt": "b", name: []}])  # there is none


def test_images_for_reward_functions_are_decoded() -> None:
    data = datasets.Dataset.from_dict({"prompt": ["a"], "image": [PICTURE]}, features=PICTURED)
    data = data.rename_column("image", "target")
    with pytest.raises(UsageError, match=r"Row 0 has a .*Image.* Add a column `uid`"):
        load_rows(data)
    (row,) = load_rows(data.add_column("uid", ["a"]))
    assert row["target"].size == (2, 2)


def test_a_mixed_column_of_a_json_file_is_no_text(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": {"k": [1]}}, {"prompt": "b", "answer": "two"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = datasets.load_dataset("json", data_files=str(path), split="train")
    assert type(data.features["answer"]).__name__ == "Json"
    assert [*load_rows(data)] == [*load_rows(path)] == rows


def test_splits_without_train_are_refused() -> None:
    data = datasets.Dataset.from_dict({"prompt": ["a"]})
    with pytest.raises(UsageError, match=r"`DatasetDict` has no split `train`, only \['test'\]"):
        load_rows(datasets.DatasetDict({"test": data}))
    streams = datasets.IterableDatasetDict({"train": data.to_iterable_dataset()})
    assert [*load_rows(streams)] == [{"prompt": "a"}]
