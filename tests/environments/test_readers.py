"""Whoever reads a completion sees what its model saw: the task of `reset`, calls, replies."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from lightning import Trainer
from transformers import AutoTokenizer

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import CompletionWriter, RolloutLogger
from lit_rlsched.callbacks.report.collect import run_data
from lit_rlsched.callbacks.rollout_logger import _cells
from lit_rlsched.engines import TransformersEngine
from lit_rlsched.rewards import JudgeReward

TASK, REPLY = " the task is 17.", "=the reply="
ROWS = [{"prompt": [{"role": "user", "content": "do it:"}]}, {}, {"level": 2}]


class World:
    def reset(self, **columns) -> str:
        return TASK

    def look(self, key: str) -> str:
        """Look something up.

        Args:
            key: What to look up.
        """
        return REPLY


def reward(prompts, completions, completion_ids, log_extra, **columns):
    log_extra("reward function", [json.dumps([prompts, completions])])
    log_extra("ids", [[*completion_ids[0]]])
    return [0.0]


def reward_with_environments(prompts, completions, completion_ids, environments, log_extra, **_):
    log_extra("reward function with environments", [json.dumps([prompts, completions])])
    log_extra("ids with environments", [[*completion_ids[0]]])
    return [0.0]


class Echo(JudgeReward):
    """Answers with the question."""

    async def answer(self, question: str) -> str:
        return f"{question}<score>5</score>"


COLUMNS = {
    "reward function": ["reward function"],
    "reward function with environments": ["reward function with environments"],
    "judge": ["judge_answer"],
}
"""Columns of the completions table that have what a reader was given."""
READERS = [*COLUMNS, "completions.jsonl", "tables", "report", "predictions", "parquet"]


@pytest.fixture(scope="module")
def read(exact_model, tools_tokenizer, tmp_path_factory):
    """What each reader has seen of each completion, as text."""
    folder = tmp_path_factory.mktemp("readers")
    files = [str(folder / f"predictions.{kind}") for kind in ("jsonl", "parquet")]

    def of(rows, *callbacks):
        settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        trainer = Trainer(
            max_epochs=1,
            default_root_dir=folder,
            enable_progress_bar=False,
            callbacks=[*callbacks],
            **settings,
        )
        data = RolloutDataModule(
            rows,
            [reward, reward_with_environments, Echo("m", "http://localhost:9", max_tokens=9999)],
            predict_data=rows,
            tokenizer=tools_tokenizer,
            environment_factory=World,
            engine=TransformersEngine(),
            prompts_per_round=3,
            num_generations=6,
            val_num_generations=3,
            max_completion_length=140,
            micro_batch_tokens=512,
            seed=3,
        )
        return trainer, {"model": GRPOModule(exact_model), "datamodule": data}

    trainer, given = of(ROWS, RolloutLogger(num_completions=99))
    trainer.fit(**given)
    trainer, given = of(ROWS, *map(CompletionWriter, files))
    trainer.predict(**given)
    lines = [json.loads(x) for x in (folder / "completions.jsonl").read_text().splitlines()]
    report = run_data(folder)["completions"]
    found = {
        reader: [[row[c] for c in names] for row in lines] for reader, names in COLUMNS.items()
    }
    columns, cells = _cells(lines)
    shown = {
        "completions.jsonl": lines,
        "tables": [dict(zip(columns, row, strict=True)) for row in cells],
        "report": [dict(zip(report["columns"], row, strict=True)) for row in report["rows"]],
        "predictions": [json.loads(line) for line in Path(files[0]).read_text().splitlines()],
        "parquet": pq.read_table(files[1]).to_pylist(),
    }
    for reader, rows in shown.items():
        found[reader] = [[row["prompt"], row["completion"]] for row in rows]
    return lines, found


@pytest.mark.parametrize("reader", READERS)
def test_the_task_the_calls_and_the_replies_are_seen(read, reader):
    _, found = read
    assert len(found[reader]) >= 6
    called = 0
    for seen in found[reader]:
        text = json.dumps(seen)
        assert TASK in text and text.count(TASK) == 1
        if REPLY in text:
            called += 1
            assert re.search(r"\blook\b", text)
    assert called > 2


def test_readers_of_one_completion_see_the_same(read):
    lines, found = read
    for i, row in enumerate(lines):
        prompts, completions = [row["prompt"]], [row["completion"]]
        for name in ("reward function", "reward function with environments"):
            assert json.loads(found[name][i][0]) == [prompts, completions]
        calls = [
            c["function"]["arguments"]["key"]
            for m in row["completion"]
            for c in m.get("tool_calls", ())
        ]
        for reader in ("judge", "tables", "report"):
            text = json.dumps(found[reader][i])
            assert text.count(REPLY) == sum(m["role"] == "tool" for m in row["completion"])
            assert all(key in text for key in calls if re.fullmatch(r"[\w ]+", key))


def test_completion_ids_begin_with_what_the_policy_has_drawn(read, tools_tokenizer):
    lines, _ = read
    tokenizer = AutoTokenizer.from_pretrained(tools_tokenizer)
    for row in lines:
        assert row["ids"] == row["ids with environments"]
        text = tokenizer.decode(row["ids"])
        assert TASK not in text and "assistant: " not in text.split(REPLY)[0]
        assert text.count(REPLY) == sum(m["role"] == "tool" for m in row["completion"])
