"""What holds for all guarded processes, whether they call reward functions or tools."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import reward_cases as cases
from harness import alive, collect, submit, wait_until

from lit_rlsched.environments.protocol import Environments
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.settings import RunFailed, UsageError
from lit_rlsched.workers import pool

Failures = dict[str, str | None]


class Rewards:
    """Asks by reward functions."""

    kind = "reward"

    def __init__(self, function: Callable[..., Any], timeout: float = 60.0) -> None:
        self.scheduler = RewardScheduler([function], timeout=timeout)

    def ask(self, texts: Iterable[str]) -> None:
        for text in texts:
            submit(self.scheduler, text, text)

    def failures(self) -> Failures:
        """Why each text has failed, or None."""
        return {text: job.failures[0] for text, job in collect(self.scheduler, 100.0).items()}


class Tools:
    """Asks by calls of a tool, each in a session of its own."""

    kind = "environment"

    def __init__(self, function: Callable[..., Any], timeout: float = 60.0) -> None:
        def use(text: str) -> str:
            """Use a text.

            Args:
                text: What to use.
            """
            return str(function(completions=[text]))

        class Loads:
            """Loads the function where a worker loads a tool."""

            def __reduce__(self) -> Any:
                return _loaded, (function, use)

        environments = Environments([use])
        environments.tools["use"] = Loads()
        self.scheduler = EnvironmentScheduler(environments, timeout=timeout)

    def ask(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.scheduler.open(text, None, {})

    def failures(self) -> Failures:
        failures: Failures = {}
        end = time.monotonic() + 100
        while self.scheduler.pending:
            assert time.monotonic() < end
            self.scheduler.wait(1.0)
            for answer in self.scheduler.poll():
                if answer.what == "lost":
                    self.scheduler.open(answer.key, None, {})
                elif answer.what == "open" and answer.failure is None:
                    self.scheduler.call(answer.key, [("use", {"text": answer.key})])
                else:
                    failures[str(answer.key)] = answer.failure
                    self.scheduler.close(answer.key)
        return failures


def _loaded(function: Any, use: Callable[..., Any]) -> Callable[..., Any]:
    getattr(function, "warm_up", lambda: None)()
    return use


@pytest.fixture(params=[Rewards, Tools])
def asked(request: pytest.FixtureRequest) -> Any:
    """Makes a scheduler of one function; its workers end with the test."""
    made: list[Any] = []

    def make(*args: Any, **settings: Any) -> Any:
        made.append(request.param(*args, **settings))
        return made[-1]

    make.kind = request.param.kind  # type: ignore[attr-defined]
    yield make
    for one in made:
        one.scheduler._end_all()


GOOD = ["a", "bb", "ccc", "dddd"]


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("spin", "timeout: "),
        ("sleep", "timeout: "),
        pytest.param("regex", "timeout: ", marks=pytest.mark.slow),
        ("exit", "crashed: the worker exited with code 1"),
        pytest.param("exit 0", "crashed: the worker exited with code 0", marks=pytest.mark.slow),
        pytest.param("segfault", "crashed: the worker died of SIGSEGV", marks=pytest.mark.slow),
        ("killed", "crashed: the worker died of SIGKILL"),
    ],
)
def test_what_ends_a_process_costs_the_call_that_ran(asked: Any, text: str, failure: str) -> None:
    use = asked(cases.misbehave, timeout=0.5)
    use.ask([*GOOD[:2], text, *GOOD[2:]])
    failures = use.failures()
    assert str(failures.pop(text)).startswith(failure)
    assert failures == dict.fromkeys(GOOD)


@pytest.mark.parametrize(
    "message",
    [
        '["unknown"]',
        '["loading", "x"]',
        *(pytest.param(bad, marks=pytest.mark.slow) for bad in ("[[]]", "[]", "{", "[[[[")),
    ],
)
def test_a_message_that_it_never_sends_costs_the_call_that_ran(asked: Any, message: str) -> None:
    def forge(completions: list[str], **columns: Any) -> list[float]:
        import gc
        import time

        if completions[0] == "forge":
            (pipe,) = [o for o in gc.get_objects() if type(o).__name__ == "Connection"]
            pipe.send_bytes(message.encode())
            time.sleep(100)
        return [1.0]

    use = asked(forge)
    use.ask(["forge", *GOOD])
    failures = use.failures()
    assert str(failures.pop("forge")).startswith("crashed: the worker sent ")
    assert failures == dict.fromkeys(GOOD)


def test_what_cannot_be_sent_is_named(asked: Any) -> None:
    lock = threading.Lock()

    def locked(completions: list[str], **columns: Any) -> list[float]:
        with lock:
            return [1.0]

    with pytest.raises(UsageError, match=r"(locked|use).* cannot be sent to a worker.*lock"):
        asked(locked).scheduler.start()


def test_what_cannot_be_loaded_is_named(asked: Any) -> None:
    use = asked(cases.Broken())
    named = rf"(`Broken`|tool use) cannot be loaded in an? {asked.kind} worker: FileNotFoundError"
    with pytest.raises(RunFailed, match=named):
        use.scheduler.start()
    assert use.scheduler._workers == []


@pytest.mark.parametrize("times", ["once", ""])
def test_a_first_worker_that_is_killed_while_it_starts_is_replaced(
    asked: Any, tmp_path: Path, times: str
) -> None:
    how = tmp_path / "signal"
    how.write_text(f"{int(signal.SIGKILL)} {times}")
    use = asked(cases.Ends(str(how)))
    if times == "once":
        use.ask(["a"])
        assert use.failures() == {"a": None}
    else:
        with pytest.raises(RunFailed, match=r"cannot .* SIGKILL \(3 times\)\. Nothing was raised"):
            use.scheduler.start()


def test_workers_killed_over_and_over_end_the_run_and_say_how_often(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_DEATHS", 3)
    use = asked(cases.length)
    use.scheduler.start()
    with pytest.raises(RunFailed, match=r"3 \w+ workers in a row .* SIGKILL \(3 times\)"):
        for _ in range(3):
            (worker,) = use.scheduler._workers
            os.kill(worker.process.pid, signal.SIGKILL)
            wait_until(lambda pid=worker.process.pid: not alive(pid))
            while worker in use.scheduler._workers or not use.scheduler._workers[0].ready:
                use.scheduler.serve(0.1)
