import json
import math
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning import Trainer

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import CompletionWriter
from lit_rlsched.cli.main import main
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.text import printable

ROOT = Path(__file__).parents[1]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


@pytest.fixture
def predict(tmp_path, tiny_model, digits):
    def predict(rows, path=None, **settings):
        data = RolloutDataModule(
            rows,
            [digits],
            predict_data=rows,
            engine=TransformersEngine(),
            max_completion_length=8,
            val_num_generations=2,
            seed=3,
            **settings,
        )
        writer = CompletionWriter(path)
        trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[writer], **QUIET)
        trainer.predict(GRPOModule(tiny_model), datamodule=data)
        return writer.file(trainer)

    return predict


def test_a_row_for_each_completion_with_columns_and_rewards(predict, sums):
    prompts = [
        {**row, "uid": f"p{i}", "completion": "mine", "input_completion": "b"}
        for i, row in enumerate(sums[:3])
    ]
    rows = [json.loads(line) for line in predict(prompts).read_text().splitlines()]
    assert [r["uid"] for r in rows] == [p["uid"] for p in prompts for _ in range(3)]
    assert [r["temperature"] for r in rows] == [0.0, 1.0, 1.0] * 3
    assert [r["answer"] for r in rows[::3]] == [p["answer"] for p in prompts]
    for row in rows:
        assert row["input_input_completion"] == "mine" != row["completion"]
        assert row["input_completion"] == "b"
        assert 0 <= row["digits"] <= 1 and row["completion_length"] <= 8
        assert row["finish_reason"] in ("stop", "length")


def test_parquet_and_rows_without_the_columns_of_rewards(predict, tmp_path):
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    with pytest.warns(UserWarning, match="No rewards are computed: .*answer"):
        path = predict(rows, str(tmp_path / "answers.parquet"))
    table = pq.read_table(path).to_pylist()
    assert [r["prompt"] for r in table] == ["1+1="] * 3 + ["2+2="] * 3
    assert all(r["digits"] is None for r in table)
    assert not list(tmp_path.glob("*.tmp"))


TRAINER = Trainer(accelerator="cpu", **QUIET)
VALUES = st.sampled_from(
    [
        st.text(max_size=5) | st.dates() | st.just("\ud800"),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 9) | st.floats(),
        st.booleans(),
        st.lists(st.integers(0, 9), max_size=2),
        st.just([{"role": "user", "content": "1"}]),
    ]
).map(lambda values: st.none() | values)
"""Values of a column that have a common type."""


@st.composite
def tables(draw: st.DrawFn) -> list[dict]:
    """Rows, of which some have a column less."""
    columns = {name: draw(VALUES) for name in draw(st.sets(st.sampled_from("abc")))}
    rows = [{"prompt": "1", "completion": draw(st.text())} for _ in range(draw(st.integers(1, 4)))]
    for row in rows:
        row |= {name: draw(of) for name, of in columns.items() if draw(st.booleans())}
    return rows


def write(path: Path, rows: list[dict]) -> None:
    """Do what the Trainer does with the callback, one row at a time."""
    writer = CompletionWriter(str(path))
    for row in rows:
        writer.write_on_batch_end(TRAINER, None, [row])
    writer.on_predict_epoch_end(TRAINER, None)


def same(read: object, written: object) -> bool:
    if isinstance(written, float) and math.isnan(written):
        return isinstance(read, float) and math.isnan(read)
    return read == written


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=tables())
def test_parquet_has_each_value_of_each_row(tmp_path: Path, rows: list[dict]) -> None:
    path = tmp_path / "answers.parquet"
    write(path, rows)
    assert [file.name for file in tmp_path.iterdir()] == ["answers.parquet"]
    table = pq.read_table(path)
    assert {*table.column_names} == {name for row in rows for name in row}
    for read, written in zip(table.to_pylist(), rows, strict=True):
        row = json.loads(json.dumps(written, default=str))  # as in the other format
        assert all(same(read[name], printable(row.get(name))) for name in read)


@pytest.mark.parametrize("values", [(1, "a"), (2**70, 1), ("a", ["b"]), ({}, {})])
def test_rows_that_cannot_be_parquet_are_kept_as_json_lines(tmp_path: Path, values) -> None:
    rows = [{"completion": "a", "prompt": "b", "answer": value} for value in values]
    with pytest.warns(UserWarning, match=r"They are in `.*answers\.parquet\.jsonl`"):
        write(tmp_path / "answers.parquet", rows)
    assert [file.name for file in tmp_path.iterdir()] == ["answers.parquet.jsonl"]
    lines = (tmp_path / "answers.parquet.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def test_a_second_time_without_the_columns_of_rewards(tmp_path, tiny_model, digits):
    data = RolloutDataModule(
        [{"prompt": "1+1=", "answer": "2"}],
        [digits],
        predict_data=[{"prompt": "1+1="}],
        engine=TransformersEngine(),
        max_completion_length=4,
    )
    for _ in range(2):
        trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **QUIET)
        with pytest.warns(UserWarning, match="No rewards are computed: .*answer"):
            ((rows,),) = [trainer.predict(GRPOModule(tiny_model), datamodule=data)]
        assert rows[0]["digits"] is None


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setattr(sys, "argv", ["lit-rlsched"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "use 1, 2 to make 3"}\n' * 1)
    main(
        [
            *("predict", "-c", "configs/quickstart.yaml", "--trainer.logger=false"),
            *("--data.engine=TransformersEngine", "--data.max_completion_length=16"),
            f"--data.predict_data={tmp_path}/prompts.jsonl",
            f"--trainer.default_root_dir={tmp_path}/out",
        ]
    )
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"5 completions in {tmp_path}/out/predictions.jsonl"
    rows = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert len(rows) == 5 and json.loads(rows[0])["prompt"] == "use 1, 2 to make 3"


def test_nothing_to_predict_on(predict, tiny_model, digits):
    data = RolloutDataModule([{"prompt": "1"}], [digits], engine=TransformersEngine())
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(Exception, match="There is nothing to predict on"):
        trainer.predict(GRPOModule(tiny_model), datamodule=data)
