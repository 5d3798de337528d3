"""Reward functions are compared with the columns of the data before anything starts."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import reward_cases as cases

from lit_rlsched.engines import EngineSpec, TransformersEngine
from lit_rlsched.rewards import JudgeReward, RewardScheduler
from lit_rlsched.rewards.checks import GIVEN, OFFERED
from lit_rlsched.rewards.functions import countdown_reward, reasoning_gym_reward
from lit_rlsched.settings import UsageError

ROWS = [{"prompt": "p", "answer": "a", "uid": 1}, {"prompt": "q", "answer": "b", "level": 3}]


def needs_answer(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


def needs_level(completions: list[str], *, level: list[int], **kwargs: Any) -> list[float]:
    return [1.0]


def misspelt(completions: list[str], anwser: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


def closed(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0]


async def asks_completion(completion: list[str], **kwargs: Any) -> list[float]:
    return [1.0]


class Needs:
    def __call__(self, gold: list[str], **kwargs: Any) -> list[float]:
        return [1.0]


def judge(template: str) -> JudgeReward:
    return JudgeReward("m", "http://localhost/v1", template=template)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            misspelt,
            r"`misspelt` requires `anwser`, and row 0 of `train_data` .* Did you mean `answer`\? "
            r"Its columns are \['answer'\]",
        ),
        (needs_level, r"`needs_level` requires `level`, and row 0 of"),
        (asks_completion, r"requires `completion`, .* Did you mean `completions`\?"),
        (Needs(), r"`Needs` requires `gold`, .* column\. Its columns are"),
        (functools.partial(misspelt, extra=1), r"`misspelt` requires `anwser`"),
        (
            closed,
            r"`closed` does not take `completion_ids`, `trainer_state`, `log_extra`, `log_metric`, "
            r"`answer`\. .* Add `\*\*kwargs`",
        ),
        (cases.strict, r"`strict` does not take `level`\. .*\['answer', 'level'\] in row 1"),
        (judge("{completion} {rubric} {reference}"), r"`judge` requires `reference`"),
        (reasoning_gym_reward, r"requires `task`, and row 0"),
        (countdown_reward, r"requires `metadata`"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: Callable, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RewardScheduler([cases.length, function]).check_columns(ROWS, "train_data")


@pytest.mark.parametrize(
    "function",
    [
        needs_answer,
        functools.partial(misspelt, anwser=["a"]),
        judge("{completion} {rubric} {answer}"),
        cases.Judge(),
        lambda *args, **kwargs: [1.0],
        dict,  # tells nothing of its arguments
    ],
)
def test_a_function_that_can_be_called_is_not(function: Callable) -> None:
    RewardScheduler([function]).check_columns(ROWS, "train_data")


def test_every_argument_that_is_passed_has_a_name_no_column_may_have() -> None:
    def echo(log_failure=None, reward_timeout=None, **columns: Any) -> list[float]:
        columns["log_extra"]("names", [sorted(columns)])
        return [1.0]

    with RewardScheduler([echo]) as scheduler:
        columns = {"answer": "a", "finish_reasons": "stop"}  # as the run passes them
        scheduler.submit("a", prompt="p", completion="c", completion_ids=[1], columns=columns)
        scheduler.wait()
        passed = scheduler.poll()[0].extra["names"]
    assert {*passed} - {"answer"} <= {*GIVEN, *OFFERED}


def test_a_column_that_is_not_passed_cannot_be_required() -> None:
    rows = [{"prompt": "p", "completion": "c"}]
    with pytest.raises(UsageError, match=r"row 0 .* no such column that is passed"):
        RewardScheduler([asks_completion]).check_columns(rows, "train_data")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": None}, r"refuses the row `a`: \['answer'\], which `template` names, is None"),
        ({"answer": "a", "rubric": "r"}, r"fills in \['rubric'\] from its settings"),
    ],
)
def test_a_judge_refuses_a_row_that_its_question_would_not_show(
    columns: dict[str, Any], message: str
) -> None:
    scheduler = RewardScheduler([judge("{completion} {rubric} {answer}")])
    scheduler.check_rows([("a", {"answer": 0, "highest": 3})])
    with pytest.raises(UsageError, match=message):
        scheduler.check_rows([("a", columns)])


@pytest.mark.parametrize("data", ["train_data", "val_data"])
def test_a_run_is_refused_before_anything_starts(fit: Callable, sums: list, data: str) -> None:
    class Engine(TransformersEngine):
        def start(self, spec: EngineSpec) -> None:
            raise AssertionError("the engine was started")

    rows = [{"prompt": row["prompt"]} for row in sums]
    with pytest.raises(UsageError, match=f"`needs_answer` requires `answer`, .*`{data}`"):
        fit(reward_funcs=[needs_answer], engine=Engine(), **{data: rows})
