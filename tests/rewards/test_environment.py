"""What reward workers see of the trainer's environment, and of other functions' keys."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from harness import collect, score, submit

import lit_rlsched
from lit_rlsched import RolloutDataModule
from lit_rlsched.engines import ProcessEngine, SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.processes import hide_environment, worker_environment
from lit_rlsched.rewards import JudgeReward, RewardScheduler, reward_worker
from lit_rlsched.settings import UsageError

SECRETS = {"WANDB_API_KEY": "canary-1", "HF_TOKEN": "canary-2", "DATABASE": "canary-3"}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def seen() -> Callable:
    """A function that logs its environment; in a closure, so that it is sent by value."""

    def sees(completions: list[str], log_extra: Callable, **kwargs: Any) -> list[float]:
        import os

        log_extra("environment", [dict(os.environ)])
        return [1.0]

    return sees


SPY = """
import os, sys
from pathlib import Path
from lit_rlsched.rewards import RewardScheduler

def spy(completions, trainer, **kwargs):
    import os
    from pathlib import Path
    places = [f"/proc/{trainer[0]}/environ", "/proc/self/environ"]
    found = [place for place in places if b"canary" in Path(place).read_bytes()]
    assert not found and "canary" not in str(os.environ), found
    return [1.0]

assert b"canary" in Path("/proc/self/environ").read_bytes()
with RewardScheduler([spy]) as scheduler:
    columns = {"trainer": os.getpid()}
    scheduler.submit(0, prompt="", completion="", completion_ids=[], columns=columns)
    scheduler.wait()
    print(os.getuid(), scheduler.poll()[0], os.environ["WANDB_API_KEY"])
"""


def an_interpreter_for(user: int) -> str:
    """One that this user may start: the tests' own may lie in a closed home."""
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import sys; assert sys.version_info >= (3, 11)"]
        try:
            if not subprocess.run(command, user=user, capture_output=True).returncode:
                return python
        except OSError:
            continue
    pytest.skip("no Python 3.11 that an unprivileged user may start")


@on_linux
@pytest.mark.parametrize("user", ["ours", "nobody"])
def test_a_worker_finds_no_secret_in_its_environment_nor_in_the_trainer_s(
    tmp_path: Path, user: str
) -> None:
    if user == "nobody" and os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    uid = os.getuid() if user == "ours" else 65534
    packages = [Path(module.__file__ or "").parents[1] for module in (lit_rlsched, cloudpickle)]
    done = subprocess.run(
        [an_interpreter_for(uid) if user == "nobody" else sys.executable, "-c", SPY],
        env={**worker_environment(), **SECRETS, "PYTHONPATH": ":".join(map(str, packages))},
        user=uid if user == "nobody" else None,
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"{uid} ScoredJob(job_id=0, scores=[1.0]"), done
    assert done.stdout.endswith("canary-1\n")  # the trainer itself still has it


@on_linux
@pytest.mark.spawned
def test_an_engine_s_process_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    engine = ProcessEngine(SimulatedEngine())
    engine.start(EngineSpec("", 2, 64, (1,)))
    try:
        shown = Path(f"/proc/{engine.pid}/environ").read_bytes()
    finally:
        engine.close()
    assert b"WANDB_API_KEY=" in shown and b"canary" not in shown


@on_linux
def test_hidden_variables_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import ctypes, os, subprocess
from pathlib import Path
from lit_rlsched.processes import hide_environment
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
for turn in range(2):
    hide_environment()
    assert b"canary" not in Path("/proc/self/environ").read_bytes()
    assert libc.getenv(b"HF_TOKEN") == b"canary-2" == os.environb[b"HF_TOKEN"]
    assert subprocess.check_output(["sh", "-c", "printf $DATABASE"]) == b"canary-3"
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **SECRETS}, check=True)
    hide_environment()  # and in this process


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


def test_a_worker_runs_the_copy_of_the_package_that_its_parent_runs(tmp_path):
    (tmp_path / "lit_rlsched").mkdir()
    (tmp_path / "lit_rlsched" / "__init__.py").touch()  # another copy, first on the path
    script = [sys.executable, "-P", reward_worker.__file__]
    environment = {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert "connect() missing 3 required" in run.stderr, run.stderr


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
