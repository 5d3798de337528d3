"""What reward workers see of the trainer's environment, and of other functions' keys."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from harness import collect, score, submit

from lit_rlsched import RolloutDataModule
from lit_rlsched.processes import worker_environment
from lit_rlsched.rewards import JudgeReward, RewardScheduler
from lit_rlsched.settings import UsageError
from lit_rlsched.workers import scores, sessions

SECRETS = {"WANDB_API_KEY": "canary-1", "HF_TOKEN": "canary-2", "DATABASE": "canary-3"}


def seen() -> Callable:
    """A function that logs its environment; in a closure, so that it is sent by value."""

    def sees(completions: list[str], log_extra: Callable, **kwargs: Any) -> list[float]:
        import os

        log_extra("environment", [dict(os.environ)])
        return [1.0]

    return sees


def test_what_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {**SECRETS, "OPENAI_API_KEY": "s", "VLLM_API_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s"}
    theirs |= {"https_proxy": "http://me:password@proxy", "HF_TOKEN_PATH": "s", "MY_SETTING": "s"}
    ours = {"CUDA_VISIBLE_DEVICES": "1", "HF_HOME": "/hf", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    ours |= {"HTTP_PROXY": "http://proxy", "PYTHONPATH": "/x", "TOKENIZERS_PARALLELISM": "1"}
    for name, value in {**theirs, **ours}.items():
        monkeypatch.setenv(name, value)
    passed = worker_environment()
    assert not theirs.keys() & passed.keys() and ours.items() <= passed.items()
    assert worker_environment(["MY_SETTING", "UNSET"]) == {**passed, "MY_SETTING": "s"}


def test_variables_that_are_named_reach_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    data = RolloutDataModule([{"prompt": "p"}], [seen()], reward_env_vars=["DATABASE"])
    with data.run.settings.rewards as scheduler:
        submit(scheduler, "x", "x")
        jobs = collect(scheduler)
    environment = jobs["x"].extra["environment"]
    assert environment["DATABASE"] == "canary-3" and environment["PATH"] == os.environ["PATH"]
    assert not {"WANDB_API_KEY", "HF_TOKEN"} & environment.keys()


@pytest.mark.slow
def test_a_judge_s_key_reaches_the_judge_s_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spying(JudgeReward):
        async def answer(self, question: str) -> str:
            return f"{sorted(os.environ)} <score>5</score>"

    monkeypatch.setenv("JUDGE_KEY", "canary")
    monkeypatch.setenv("HF_TOKEN", "canary")
    keyed = Spying("m", "http://localhost/v1", api_key_env="JUDGE_KEY")
    open_one = Spying("m", "http://localhost/v1", name="open_judge")
    with RewardScheduler([seen(), keyed, open_one], workers=2) as scheduler:
        assert len(scheduler._workers) == 4  # two of each kind
        for number in range(6):
            submit(scheduler, number, "x")
        jobs = collect(scheduler)
    assert all(job.scores == [1.0, 0.5, 0.5] for job in jobs.values())
    for job in jobs.values():
        assert "'JUDGE_KEY'" in job.extra["judge_answer"]
        assert "HF_TOKEN" not in job.extra["judge_answer"]
        assert "JUDGE_KEY" not in job.extra["environment"]
        assert "JUDGE_KEY" not in job.extra["open_judge_answer"]


def test_what_goes_wrong_in_one_kind_of_worker_costs_the_other_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import reward_cases as cases

    class Keyed:
        env_vars = ("JUDGE_KEY",)

        def __call__(self, completions: list[str], **kwargs: Any) -> Any:
            return cases.misbehave(completions)

    monkeypatch.setenv("JUDGE_KEY", "canary")
    texts = ["a", "exit", "bb", "spin", "ccc", "segfault", "dddd"]
    jobs, counters = score([cases.length, Keyed()], texts, timeout=0.4)
    fine = {"a", "bb", "ccc", "dddd"}
    assert {text: job.scores for text, job in jobs.items()} == {
        text: [float(len(text)), float(len(text)) if text in fine else None] for text in texts
    }
    assert counters["rewards/Keyed/crashes"] == 2 and counters["rewards/Keyed/timeouts"] == 1
    assert sum(counters.values()) == 3


def test_a_function_that_misses_a_variable_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needs(completions: list[str], **kwargs: Any) -> list[float]:
        import os

        return [float(os.environ[completions[0]])]

    monkeypatch.setenv("MY_SETTING", "3")
    jobs, _ = score([needs], ["MY_SETTING", "NOWHERE_SET"])
    assert "list it in `reward_env_vars`" in str(jobs["MY_SETTING"].failures[0])
    assert "reward_env_vars" not in str(jobs["NOWHERE_SET"].failures[0])


@pytest.mark.parametrize("script", [scores, sessions])
def test_a_worker_runs_the_copy_of_the_package_that_its_parent_runs(script, tmp_path):
    (tmp_path / "lit_rlsched").mkdir()
    (tmp_path / "lit_rlsched" / "__init__.py").touch()  # another copy, first on the path
    command = [sys.executable, "-P", script.__file__]
    environment = {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "Child.__init__() missing 3 required" in run.stderr, run.stderr


def test_a_variable_of_one_function_does_not_come_to_where_tools_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tools run where functions are called with environments, and would see it."""

    def keyed(environments: list[Any], **kwargs: Any) -> list[float]:
        return [1.0]

    keyed.env_vars = ("JUDGE_KEY", "NOWHERE_SET")  # type: ignore[attr-defined]
    monkeypatch.setenv("JUDGE_KEY", "canary")
    with pytest.raises(UsageError, match=r"`keyed` has `env_vars=\['JUDGE_KEY'\]`.*reward_env_v"):
        RewardScheduler([keyed], environments=True)
    RewardScheduler([keyed], environments=True, env_vars=["JUDGE_KEY"])
    monkeypatch.delenv("JUDGE_KEY")
    RewardScheduler([keyed], environments=True)
