import functools
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reward_cases as cases
from harness import alive, collect, score, submit, wait_until

from lit_rlsched.rewards import RewardScheduler
from lit_rlsched.settings import UsageError
from lit_rlsched.text import printable

GOOD = ["a" * n for n in range(1, 21)]


@pytest.fixture
def scheduler() -> Iterator[RewardScheduler]:
    with RewardScheduler([cases.misbehave], timeout=0.4) as scheduler:
        yield scheduler


@pytest.mark.parametrize(
    ("completion", "counter", "text"),
    [
        ("raise", "raised", "raised: ZeroDivisionError: in the reward"),
        ("quit", "raised", "raised: SystemExit: bye"),
        ("interrupt", "raised", "raised: KeyboardInterrupt"),
        ("two scores", "bad_returns", "2 scores for 1 completion"),
        ("no list", "bad_returns", "float is not a list of scores"),
        ("text", "bad_returns", "'1.0' is not a number"),
        ("infinite", "bad_returns", "inf"),
        ("spin", "timeouts", "killed after 0.4 s"),
        ("close everything", "crashes", ""),
    ],
)
def test_a_failure_costs_one_completion(
    scheduler: RewardScheduler, completion: str, counter: str, text: str
) -> None:
    for each in [*GOOD[:10], completion, *GOOD[10:]]:
        submit(scheduler, each, each)
    jobs = collect(scheduler)
    bad = jobs.pop(completion)
    assert bad.scores == [None]
    assert bad.failures[0] is not None and text in bad.failures[0]
    assert {job_id: job.scores for job_id, job in jobs.items()} == {
        good: [float(len(good))] for good in GOOD
    }
    assert all(job.failures == [None] for job in jobs.values())
    counters = scheduler.counters()
    assert counters.pop(f"rewards/misbehave/{counter}") == 1
    assert not any(counters.values())


def test_many_failures_at_once() -> None:
    bad = ["raise", "spin", "exit", "segfault", "text", "killed"]
    completions = [text for pair in zip(GOOD, bad, strict=False) for text in pair] + GOOD[6:]
    jobs, counters = score([cases.misbehave], completions, workers=3, timeout=0.4)
    assert {job_id for job_id, job in jobs.items() if job.scores == [None]} == set(bad)
    assert {job_id for job_id, job in jobs.items() if job.scores != [None]} == set(GOOD)
    assert counters == {
        "rewards/misbehave/raised": 1,
        "rewards/misbehave/timeouts": 1,
        "rewards/misbehave/crashes": 3,
        "rewards/misbehave/out_of_memory": 0,
        "rewards/misbehave/bad_returns": 1,
    }


@pytest.mark.slow
def test_a_failing_function_leaves_the_others_their_scores() -> None:
    functions = [cases.length, cases.misbehave, cases.judge, cases.peculiar]
    jobs, counters = score(functions, ["exit", "spin", "raise", "fine"], timeout=0.4)
    assert jobs["raise"].scores == [5.0, None, None, 0.5]
    assert jobs["exit"].scores == [4.0, None, None, 0.5]
    assert jobs["spin"].scores == [4.0, None, None, 0.5]
    assert jobs["fine"].scores == [4.0, 4.0, 4.0, 0.5]
    assert counters["rewards/misbehave/crashes"] == counters["rewards/judge/crashes"] == 1
    assert counters["rewards/misbehave/timeouts"] == counters["rewards/judge/timeouts"] == 1
    assert counters["rewards/length/crashes"] == counters["rewards/peculiar/timeouts"] == 0


def test_what_counts_as_a_score() -> None:
    jobs, counters = score([cases.peculiar], ["none", "nan", "true", "int", "other"])
    scores = {job_id: job.scores[0] for job_id, job in jobs.items()}
    assert scores == {"none": None, "nan": None, "true": 1.0, "int": 3.0, "other": 0.5}
    assert all(type(value) in (float, type(None)) for value in scores.values())
    assert not any(counters.values())


@pytest.mark.mostly_slow("await forever", "own timeout", "raise", "exit", "quit")
@pytest.mark.parametrize("bad", ["await forever", "own timeout", "raise", "spin", "exit", "quit"])
def test_a_coroutine_that_fails_costs_one_completion(bad: str) -> None:
    jobs, counters = score([cases.judge], [*GOOD[:5], bad, *GOOD[5:10]], timeout=0.3)
    kinds = {"await forever": "timeouts", "spin": "timeouts", "exit": "crashes"}
    assert jobs.pop(bad).scores == [None]
    assert all(job.scores == [float(len(text))] for text, job in jobs.items())
    assert counters.pop(f"rewards/judge/{kinds.get(bad, 'raised')}") == 1
    assert not any(counters.values())


def test_one_event_loop_for_a_worker_s_life() -> None:
    with RewardScheduler([cases.Judge()]) as scheduler:
        assert scheduler.names == ["Judge"]
        for turn in range(3):
            submit(scheduler, turn, "x")
            assert collect(scheduler)[turn].scores == [1.0]


def test_arguments_are_trl_s() -> None:
    functions = [cases.tell_arguments, functools.partial(cases.tell_arguments, extra=1)]
    chat = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "a"}]
    with RewardScheduler(functions) as scheduler:
        assert scheduler.names == ["tell_arguments", "tell_arguments_2"]
        scheduler.submit(
            7,
            prompt=chat,
            completion=answer,
            completion_ids=(5, 6),
            columns={"prompt": "dropped", "level": 3, "finish_reasons": "stop"},
            trainer_state={"global_step": 4},
        )
        (job,) = collect(scheduler).values()
    assert job.extra["keywords"] == {
        "prompts": [chat],
        "completions": [answer],
        "completion_ids": [[5, 6]],
        "level": [3],
        "finish_reasons": ["stop"],
        "trainer_state": {"global_step": 4},
        "extra": 1,
    }
    assert job.metrics == {"rows": [1.0, 1.0]}
    assert all(seconds is not None and seconds < 1 for seconds in job.seconds)


def test_a_function_may_know_its_time_and_say_why_it_gives_no_score() -> None:
    def tells(completions, *, reward_timeout, log_failure, **kwargs):
        if completions[0] != "good":
            log_failure(completions[0], f"within {reward_timeout} s")
        return [reward_timeout]

    with RewardScheduler([tells, cases.length], timeout=60.0) as scheduler:
        for kind in ("good", "no_answer", "unparsed", "bad luck"):
            submit(scheduler, kind, kind, timeout=7.0 if kind == "good" else None)
        jobs = collect(scheduler)
        counters = scheduler.counters()
    assert jobs["good"].scores == [7.0, 4.0]
    assert jobs["no_answer"].scores == [None, 9.0]
    assert jobs["no_answer"].failures == ["no_answer: within 60.0 s", None]
    assert jobs["unparsed"].failures == ["unparsed: within 60.0 s", None]
    assert "use one of ('no_answer', 'unparsed')" in str(jobs["bad luck"].failures[0])
    assert {name for name, count in counters.items() if count} == {
        "rewards/tells/no_answers",
        "rewards/tells/unparsed",
        "rewards/tells/raised",
    }
    assert "rewards/length/no_answers" not in counters


def test_functions_get_copies() -> None:
    with RewardScheduler([cases.spoil, cases.size_of_info]) as scheduler:
        submit(scheduler, 0, "abc", columns={"info": {"k": 1}})
        assert collect(scheduler)[0].scores == [0.0, 4.0]


def test_prints_break_nothing(capfd: pytest.CaptureFixture) -> None:
    jobs, _ = score([cases.noisy], ["a", "b"])
    assert all(job.scores == [1.0] for job in jobs.values())
    assert capfd.readouterr().out.count("x") == 200_000


def test_workers_import_nothing_heavy() -> None:
    from lit_rlsched.rewards.functions import SoftOverlongPunishment

    jobs, _ = score([cases.heavy_imports, SoftOverlongPunishment(10, 5)], ["a"])
    assert jobs["a"].scores == [0.0, 0.0]


def test_scores_do_not_depend_on_the_schedule() -> None:
    functions = [cases.length, cases.judge]
    first, _ = score(functions, GOOD)
    second, _ = score(functions, GOOD[::-1], workers=3)
    assert {k: job.scores for k, job in first.items()} == {
        k: job.scores for k, job in second.items()
    }


def test_poll_does_not_wait_and_time_outs_can_be_chosen(scheduler: RewardScheduler) -> None:
    assert not scheduler.wait() and scheduler.poll() == [] and scheduler.pending == 0
    submit(scheduler, "hang", "sleep", timeout=1.0)
    start = time.monotonic()
    for _ in range(1000):
        assert scheduler.poll() == []
    assert time.monotonic() - start < 0.5
    assert not scheduler.wait(0.05) and scheduler.pending == 1
    assert scheduler.wait() and time.monotonic() - start >= 1.0
    assert scheduler.poll()[0].failures == ["timeout: killed after 1 s"]
    assert not scheduler.wait()


def test_poll_returns_jobs_in_the_order_of_submission(scheduler: RewardScheduler) -> None:
    for number in range(8):
        submit(scheduler, number, "a")
    assert scheduler.wait() and scheduler.wait() and scheduler.pending == 8
    returned: list[object] = []
    while len(returned) < 8:
        assert scheduler.wait(timeout=60)
        returned += [job.job_id for job in scheduler.poll()]
    assert returned == list(range(8)) and scheduler.pending == 0


def test_cancelled_jobs_never_come_back(scheduler: RewardScheduler) -> None:
    for job_id, text in enumerate(["a", "spin", "exit", "bb"]):
        submit(scheduler, job_id, text)
    scheduler.poll()
    scheduler.cancel([0, 1, 2, "unknown"])
    assert scheduler.pending == 1
    submit(scheduler, 1, "ccc")
    assert {k: job.scores for k, job in collect(scheduler).items()} == {3: [2.0], 1: [3.0]}
    assert not any(scheduler.counters().values())


def test_a_job_id_is_used_once_at_a_time(scheduler: RewardScheduler) -> None:
    submit(scheduler, 0, "a")
    with pytest.raises(UsageError, match="job 0 is still being scored"):
        submit(scheduler, 0, "a")


def test_close_leaves_no_process_and_submit_starts_anew() -> None:
    scheduler = RewardScheduler([cases.misbehave], workers=2)
    scheduler.start()
    pids = [worker.process.pid for worker in scheduler._workers]
    submit(scheduler, 0, "spin")
    scheduler.poll()
    scheduler.close()
    scheduler.close()
    assert not any(map(alive, pids)) and scheduler.pending == 0
    submit(scheduler, 0, "a")
    assert collect(scheduler)[0].scores == [1.0]
    pids = [worker.process.pid for worker in scheduler._workers]
    del scheduler
    assert not any(map(alive, pids))


def test_what_a_function_started_dies_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    with RewardScheduler([cases.start_child], timeout=0.5) as scheduler:
        submit(scheduler, 0, str(told))
        assert collect(scheduler)[0].scores == [None]
    worker, child = map(int, told.read_text().split())
    wait_until(lambda: not alive(worker) and not alive(child))


def run_script(path: Path, source: str, *arguments: str) -> "subprocess.Popen[str]":
    path.write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def test_no_orphan_outlives_a_killed_trainer(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    source = """
import sys, time
import reward_cases
from lit_rlsched.rewards import RewardScheduler
scheduler = RewardScheduler([reward_cases.start_child], workers=2)
scheduler.submit(0, prompt="", completion=sys.argv[1], completion_ids=[], columns={})
scheduler.poll()
print(*[worker.process.pid for worker in scheduler._workers], flush=True)
time.sleep(100)
"""
    trainer = run_script(tmp_path / "train.py", source, str(told))
    assert trainer.stdout is not None
    pids = list(map(int, trainer.stdout.readline().split()))
    wait_until(lambda: told.exists() and len(told.read_text().split()) == 2)
    pids += map(int, told.read_text().split())
    assert all(map(alive, pids)) and len(set(pids)) == 3
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not any(map(alive, pids)))


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    source = """
print("main", flush=True)
import math
from lit_rlsched.rewards import RewardScheduler

BONUS = 10

class Counter:
    def __call__(self, completions, **kwargs):
        return [helper(text) for text in completions]

def helper(text):
    return math.floor(len(text)) + BONUS

def closure(n):
    async def inner(completions, **kwargs):
        return [n]
    return inner

scheduler = RewardScheduler([helper_user := Counter(), closure(3), lambda **kwargs: [BONUS]])
scheduler.submit(0, prompt="", completion="abc", completion_ids=[], columns={})
scheduler.wait()
print(scheduler.names, scheduler.poll()[0].scores)
"""
    output, _ = run_script(tmp_path / "train.py", source).communicate(timeout=60)
    assert output == "main\n['Counter', 'inner', '<lambda>'] [13.0, 3.0, 10.0]\n"


def test_a_module_the_worker_cannot_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases.length, "__module__", "nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", cases)
    assert pickle.loads(pickle.dumps(cases.length)) is cases.length
    with pytest.raises(RuntimeError, match=r"`length` cannot be loaded.* module named 'nowhere'"):
        RewardScheduler([cases.length]).start()


def test_warming_up_counts_for_no_time_out_and_a_lost_import_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with RewardScheduler([cases.LoadsWhile(str(file))], timeout=0.2) as scheduler:
        submit(scheduler, 0, "a")
        submit(scheduler, 1, "exit")
        submit(scheduler, 2, "bb")
        jobs = collect(scheduler)
        assert [jobs[n].scores for n in range(3)] == [[1.0], [None], [2.0]]
        file.unlink()
        submit(scheduler, 3, "exit")
        submit(scheduler, 4, "a")
        with pytest.raises(RuntimeError, match="the file is gone"):
            collect(scheduler)


def test_weights() -> None:
    assert RewardScheduler([cases.length], reward_weights=[0.5]).weights == [0.5]
    assert RewardScheduler([cases.length, cases.judge]).weights == [1.0, 1.0]


def test_failures_are_logged_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    with RewardScheduler([cases.misbehave]) as scheduler:
        for number in range(30):
            submit(scheduler, number, "raise")
        collect(scheduler)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    assert "`misbehave` gave no score" in logged[0] and "reward_cases.py" in logged[0]
    assert logged[1].endswith("[raised no. 10]")


@pytest.mark.parametrize("levels", [50, 150, 990, 5000])
def test_what_is_logged_may_be_nested_as_deeply_as_a_model_writes(levels: int) -> None:
    """The score counts; what JSON and tables cannot follow is left out."""

    def logs(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
        inner: Any = "x"
        for _ in range(int(completions[0])):
            inner = [inner]
        log_extra("inner", [inner])
        return [1.0]

    jobs, counters = score([logs], [str(levels)])
    job = jobs[str(levels)]
    assert job.scores == [1.0] and not any(counters.values())
    assert ("inner" in job.extra) == (levels < 100)
    json.dumps(printable(job.extra))
