"""The examples of CONTRIBUTING.md, as they are printed."""

import re
from pathlib import Path

import pytest
from seen_rounds import Rounds

from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.settings import UsageError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def example(heading):
    """What the one block of Python under a heading defines."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {"__name__": "contributing"}
    exec(compile(code, f"CONTRIBUTING.md, {heading}", "exec"), names)
    return names


def test_every_block_is_run():
    assert PAGE.count("```python") == 3


def test_what_is_named_is_there():
    folders = "lit_rlsched|tests|docs(?!/_build)|requirements|examples"
    for path in re.findall(rf"`((?:{folders})/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in (PAGE, (ROOT / "AGENTS.md").read_text()):
        assert set(re.findall(r"`make ([a-z-]+)", page)) <= set(targets)


def test_a_schedule(fit):
    callback = example("Add a schedule")["FirstDoneBatching"]()
    rounds = Rounds()
    settings = {"prompts_per_round": 3, "num_generations": 2, "max_completion_length": 200}
    _, _, data = fit(callbacks=[callback, rounds], **settings)
    for round in rounds.rounds:
        assert 3 <= len(round.groups) < 6, "it was over before all of six were done"
        assert all(c.finished for c in round.completions)
        assert round.metrics["rollout/useful_token_share"] < 1, "the rest begins anew"
    assert len(rounds.rounds) == 2 and len(data.run.pool) == 6 - len(rounds.rounds[-1].groups)


def test_a_reward_function():
    reward = example("Add a reward function")["ends_with_answer"]
    with RewardScheduler([reward]) as rewards:
        for text in ("1+1= 2 ", "3"):
            row = {"completion": text, "completion_ids": [4], "columns": {"answer": "2"}}
            rewards.submit(text, prompt="1+1=", **row)
        scores = {}
        while len(scores) < 2 and rewards.wait(60):
            scores |= {job.job_id: job.scores for job in rewards.poll()}
        assert scores == {"1+1= 2 ": [1.0], "3": [0.0]}
        with pytest.raises(UsageError, match="`ends_with_answer` refuses the row `a`: `answer` is"):
            rewards.check_rows([("a", {"answer": ""})])


def test_a_task(fit):
    task = example("Add a task")["Sums"]
    assert task().rows() == task().rows()
    train, held = ({row["prompt"] for row in task(split).rows()} for split in ("train", "heldout"))
    assert not train & held and len(train) > len(held) > 10
    rounds = Rounds()
    fit(callbacks=[rounds], train_data=task(), trainer={"max_epochs": 1})
    (round,) = rounds.rounds
    assert len(round.completions) == 16 and all(c.scored for c in round.completions)
