"""Reward functions that fork, leave processes behind, eat memory or are stopped from outside."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reward_cases as cases
from harness import alive, collect, score, submit, wait_until

from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.rewards.jobs import RewardWorker
from lit_rlsched.workers import pool

GOOD = ["a" * n for n in range(1, 11)]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limits and /proc")


def fork_and_return(kind: str) -> Callable:
    """Forks for the completion `fork`; the child returns from the function as its parent does."""

    def fork(completions: list[str], **kwargs: Any) -> list[float]:
        import ctypes
        import os

        if completions[0] == "fork":
            child = ctypes.CDLL(None).fork() if kind == "in C" else os.fork()
            if child == 0 and kind == "raises":
                raise SystemExit(3)
        return [float(len(completions[0]))]

    async def fork_async(completions: list[str], **kwargs: Any) -> list[float]:
        return fork(completions)

    return fork_async if kind == "async" else fork


@pytest.mark.parametrize("kind", ["in Python", "in C", "raises", "async"])
def test_a_forked_child_that_comes_back_reports_nothing(kind: str) -> None:
    jobs, counters = score([fork_and_return(kind)], [*GOOD, "fork", "fork again", *"xyz"])
    assert {text: job.scores for text, job in jobs.items()} == {
        text: [float(len(text))] for text in (*GOOD, "fork", "fork again", *"xyz")
    }
    assert not any(counters.values())


def test_a_forked_child_does_not_hide_that_its_parent_crashed(tmp_path: Path) -> None:
    told = tmp_path / "child"

    def fork_and_crash(completions: list[str], **kwargs: Any) -> list[float]:
        import os
        import time

        if completions[0] == "fork":
            if child := os.fork():
                told.write_text(str(child))
                os._exit(1)
            time.sleep(1000)
        return [1.0]

    jobs, counters = score([fork_and_crash], [*GOOD, "fork"], timeout=100.0)
    assert jobs["fork"].failures == ["crashed: the worker exited with code 1"]
    assert all(jobs[text].scores == [1.0] for text in GOOD)
    assert sum(counters.values()) == 1
    wait_until(lambda: not alive(int(told.read_text())))


@on_linux
@pytest.mark.parametrize("way", ["at once", "bit by bit", "leak", "in another process"])
def test_eating_memory_costs_one_completion(way: str) -> None:
    jobs, counters = score(
        [cases.eat], [*GOOD[:5], way, *GOOD[5:]], memory_limit="256MiB", timeout=60.0
    )
    kind = "raised" if way == "in another process" else "out_of_memory"
    assert jobs.pop(way).scores == [None]
    assert {text: job.scores for text, job in jobs.items()} == {g: [float(len(g))] for g in GOOD}
    assert counters.pop(f"rewards/eat/{kind}") == 1
    assert not any(counters.values())


@pytest.mark.slow
@on_linux
def test_what_loading_takes_does_not_count_and_half_the_machine_is_the_default() -> None:
    class Holds:
        held = None

        def warm_up(self) -> None:
            Holds.held = bytearray(600 << 20)

        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            import re
            import resource

            (data,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
            assert int(data) > 600 << 10
            return [float(resource.getrlimit(resource.RLIMIT_DATA)[0] - int(data) * 1024)]

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    given, _ = score([Holds()], ["x"], memory_limit="256MiB")
    default, _ = score([Holds()], ["x"], workers=2)
    assert given["x"].scores[0] == pytest.approx(256 << 20, abs=16 << 20)
    assert default["x"].scores[0] <= memory / 4


def test_threads_that_live_on_hold_nothing_up() -> None:
    def start_thread(completions: list[str], **kwargs: Any) -> list[float]:
        import threading
        import time

        threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
        return [1.0]

    with RewardScheduler([start_thread]) as scheduler:
        for text in GOOD:
            submit(scheduler, text, text)
        assert all(job.scores == [1.0] for job in collect(scheduler).values())
        pid = scheduler._workers[0].process.pid
    assert not alive(pid)


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        (signal.SIGKILL, "crashed: the worker died of SIGKILL"),
        (signal.SIGTERM, "crashed: the worker died of SIGTERM"),
        (signal.SIGSTOP, "timeout: killed after 1.5 s"),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGSTOP"],
)
def test_a_signal_from_outside_costs_the_completion_that_ran(
    tmp_path: Path, number: signal.Signals, failure: str
) -> None:
    running = str(tmp_path / "running")
    with RewardScheduler([cases.wait_for], timeout=1.5) as scheduler:
        for text in [*GOOD[:5], running, *GOOD[5:]]:
            submit(scheduler, text, text)
        while not os.path.exists(running):
            scheduler.wait(0.01)
        os.kill(scheduler._workers[0].process.pid, number)
        scheduler.wait(0.0)
        jobs = collect(scheduler)
        counters = scheduler.counters()
    bad = jobs.pop(running)
    assert len(jobs) <= len(GOOD) and all(job.scores == [float(len(t))] for t, job in jobs.items())
    assert bad.failures == [failure] and sum(counters.values()) == 1


def test_a_stopped_worker_that_waits_does_not_block_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "PIPE_TIMEOUT", 0.5)
    with RewardScheduler([cases.wait_for], timeout=1.0) as scheduler:
        os.kill(scheduler._workers[0].process.pid, signal.SIGSTOP)
        for text in GOOD:  # more than the pipe holds
            submit(scheduler, text, text, columns={"code": "x" * 1_000_000})
        jobs = collect(scheduler)
        assert {text: job.scores for text, job in jobs.items()} == {
            text: [float(len(text))] for text in GOOD
        }
        assert not any(scheduler.counters().values())


@pytest.mark.parametrize(
    "message",
    [
        '["score", 0, 0, NOW, 0.0, 1.0, null, {}, {}]',
        '["score", 3, 1, NOW, 0.0, 1.0, null, {}, {}]',
        '["score", 3, 0, NOW]',
        '["score", 3, 0, NOW, 0.0, "1", null, {}, {}]',
        '["score", 3, 0, NOW, 0.0, Infinity, null, {}, {}]',
        '["score", 3, 0, NOW, 0.0, null, "unheard_of: x", {}, {}]',
        '["score", 3, 0, NOW, 0.0, 1.0, null, {}, {"metric": 1}]',
        '["score", [3], 0, NOW, 0.0, 1.0, null, {}, {}]',
        '["begun", NOW]',
        '["begun", 1e300]',
        '["ready"]',
        '["loading", 0]',
        '["unloadable", 7, "x"]',
        "[" * 100_000,
    ],
)
def test_a_message_out_of_order_costs_the_completion_that_ran(message: str) -> None:
    """A reward function runs in the process that reports, and may write to its pipe."""
    jobs, counters = score([cases.forge], ["a", "bb", "ccc", message, "dddd"], timeout=100.0)
    assert jobs.pop(message).failures[0].startswith("crashed: the worker sent ")
    assert {text: job.scores for text, job in jobs.items()} == {
        text: [float(len(text))] for text in ("a", "bb", "ccc", "dddd")
    }
    assert counters.pop("rewards/forge/crashes") == 1 and not any(counters.values())


def test_a_message_that_claims_to_be_huge_is_not_read() -> None:
    def claim(completions: list[str], **kwargs: Any) -> list[float]:
        import gc
        import os
        import struct
        import time

        if completions[0] == "claim":
            (pipe,) = [o for o in gc.get_objects() if type(o).__name__ == "Connection"]
            os.write(pipe.fileno(), struct.pack("!i", 2**31 - 1))
            time.sleep(100)
        return [1.0]

    jobs, counters = score([claim], ["a", "claim", "b"], timeout=100.0)
    assert [jobs[text].scores for text in ("a", "claim", "b")] == [[1.0], [None], [1.0]]
    assert counters["rewards/claim/crashes"] == 1


def test_a_call_that_has_not_begun_is_not_to_blame_for_its_worker_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "MAX_DEATHS", 3)
    assign = RewardWorker.assign

    def assign_to_the_dead(worker: RewardWorker, *work: Any) -> None:
        os.kill(worker.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(worker.process.pid))
        assign(worker, *work)

    monkeypatch.setattr(RewardWorker, "assign", assign_to_the_dead)
    with RewardScheduler([cases.length]) as scheduler:
        submit(scheduler, 0, "a")
        with pytest.raises(RuntimeError, match=r"3 reward workers in a row .* SIGKILL \(3 times\)"):
            collect(scheduler)
        assert not any(scheduler.counters().values())
