"""Reward functions get what TRL gives them: the same arguments, and `trainer_state`."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden_trl import build_trainer
from seen_rounds import Rounds
from transformers import TrainerState

from lit_rlsched.run.startup import trainer_state


def curriculum() -> Callable:
    """One that uses all TRL gives, in a closure so that it is sent by value."""

    def curriculum(
        prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric
    ) -> list[float]:
        state = trainer_state
        progress = [state.global_step, state.max_steps, state.epoch]
        log_extra("progress", [progress] * len(prompts))
        log_extra("types", [[type(x[0]).__name__ for x in (prompts, completions, answer)]])
        log_extra("ids", [all(isinstance(i, int) for ids in completion_ids for i in ids)])
        log_metric("share_done", state.global_step / state.max_steps)
        return [float(len(text)) for text in completions]

    return curriculum


@pytest.mark.logs("share_done")
def test_a_function_of_trl_s_runs_with_trl_and_with_us(
    fit: Callable, tiny_model: str, tmp_path: Path
) -> None:
    theirs: dict[str, Any] = {}
    trl = build_trainer("grpo", tiny_model, tmp_path)
    trl.reward_funcs, trl.reward_func_names = [curriculum()], ["curriculum"]
    trl.reward_processing_classes = [None]
    trl.state.global_step, trl.state.max_steps, trl.state.epoch = 1, 4, 0.1
    trl._log_completion_extra = lambda column, values: theirs.setdefault(column, values[0])
    trl._log_metric = theirs.__setitem__
    trl._calculate_rewards([{"prompt": "ab", "answer": "c"}], ["ab"], ["xyz"], [[5, 6, 7]])

    rounds = Rounds()
    fit(
        callbacks=[rounds],
        reward_funcs=[curriculum()],
        steps_per_round=2,
        trainer={"max_epochs": 2},
    )
    extras = [c.extra for round in rounds.rounds for c in round.completions]
    # 80 prompts, 4 a round, two steps of two prompts
    assert {tuple(extra["progress"]) for extra in extras} == {(0, 4, 0.0), (2, 4, 0.05)}
    assert all(extra["types"] == theirs["types"] == ["str"] * 3 for extra in extras)
    assert all(extra["ids"] is theirs["ids"] is True for extra in extras)
    assert theirs["share_done"] == 0.25
    assert [m["share_done"] for m in rounds.metrics] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "expected"),
    [(-1, 5, 10), (7, -1, 7), (7, 5, 7), (70, 5, 10), (-1, -1, -1), (7, None, 7)],
)
def test_max_steps_is_where_the_run_ends(
    max_steps: int, max_epochs: int | None, expected: int
) -> None:
    trainer: Any = SimpleNamespace(max_steps=max_steps, max_epochs=max_epochs, global_step=5)
    state = trainer_state(
        trainer, trainer.global_step, steps_per_round=2, prompts_per_round=8, prompts=40
    )
    assert state == SimpleNamespace(global_step=5, max_steps=expected, epoch=0.5)
    assert vars(state).keys() <= vars(TrainerState()).keys()  # named as theirs are


def test_held_out_prompts_are_scored_with_it_too(fit: Callable, sums: list) -> None:
    def needs_it(completions, trainer_state, **kwargs) -> list[float]:
        return [1.0 + trainer_state.global_step]

    trainer, _, _ = fit(reward_funcs=[needs_it], val_data=sums[80:84])
    assert trainer.callback_metrics["val/reward"] == 3.0  # after two steps
