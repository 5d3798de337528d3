"""Sessions in worker processes: what goes wrong costs the session that it goes wrong in."""

import asyncio
import functools
import math
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from functools import partial
from itertools import count

import numpy as np
import psutil
import pytest
from worlds import Troubled, look, notes, wait_and_look

from lit_rlsched.environments.protocol import Environments
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.settings import RunFailed, UsageError

MEMORY = 512 << 20


@pytest.fixture
def schedule():
    """Make schedulers that are shut down at the end."""
    made = []

    def schedule(tools=None, factory=None, **settings):
        environments = Environments(tools, factory)
        rewards = None
        if environments.rewards:
            rewards = RewardScheduler(environments.rewards, environments=True)
        scheduler = EnvironmentScheduler(environments, rewards, **settings)
        made.append(scheduler)
        return scheduler

    yield schedule
    for scheduler in made:
        scheduler.shut_down()


def answers(scheduler, number, seconds=30):
    """The next answers, by key."""
    found, end = {}, time.monotonic() + seconds
    while len(found) < number:
        assert time.monotonic() < end, f"only {found}"
        scheduler.wait(1.0)
        found |= {answer.key: answer for answer in scheduler.poll()}
    return found


def test_a_session_remembers_what_was_called(schedule):
    scheduler = schedule(factory=notes())
    for key in "ab":
        scheduler.open(key, None, {"prompt": "?", "seed": 8})
    assert {a.result for a in answers(scheduler, 2).values()} == {" (1)"}
    scheduler.call("a", [("look", {"key": "x"}), ("look", {"key": "xy"})])
    scheduler.call("b", [("look", {"key": "x"})])
    found = answers(scheduler, 2)
    assert found["a"].result == [("look", "19", False), ("look", "20", False)]
    assert found["b"].result == [("look", "19", False)]
    row = {"prompt": "?", "completion": "", "completion_ids": [1], "columns": {}}
    for key in "ab":
        scheduler.reward(key, {**row, "trainer_state": None})
    results = {key: answer.result[0] for key, answer in answers(scheduler, 2).items()}
    assert {key: result.score for key, result in results.items()} == {"a": 2.0, "b": 1.0}
    for key in "ab":
        scheduler.close(key)
    assert scheduler.open_sessions == scheduler.pending == 0


def test_calls_that_fail_are_answered_as_by_trl(schedule):
    scheduler = schedule([look, wait_and_look])
    scheduler.open("a", None, {})
    answers(scheduler, 1)
    calls = [
        ("wait_and_look", {"key": "xy"}),
        ("look", {"key": "xyz"}),
        ("sing", {}),
        ("look", {"lock": "x"}),
        ("look", ["x"]),
    ]
    scheduler.call("a", calls)
    sync, unknown, bad, no_dict, later = answers(scheduler, 1)["a"].result
    assert sync == ("look", "3", False)
    assert unknown == ("sing", "{'error': 'Tool sing not found.'}", True)
    assert bad[2] and "lock" in bad[1]
    why = """{'error': 'The arguments of look must be a JSON object, not ["x"].'}"""
    assert no_dict == ("look", why, True)
    assert later == ("wait_and_look", "2", False)  # async calls come after sync ones


@pytest.mark.parametrize(
    ("trouble", "failure"),
    [("exit", "crashed"), pytest.param("lock", "timeout", marks=pytest.mark.slow)],
)
def test_suspects_run_alone_until_the_culprit_is_known(schedule, trouble, failure):
    """One worker: each of them waits until the sessions before it have ended."""
    scheduler = schedule(factory=Troubled, timeout=1.0)
    troubles = {"a": "slow", "b": None, "c": trouble, "d": "slow"}
    for key in troubles:
        scheduler.open(key, None, {"trouble": troubles[key]})
    answers(scheduler, 4)
    for key in troubles:
        scheduler.call(key, [("look", {"key": "x"})])
    ends, shared, end = {}, {}, time.monotonic() + 60
    while len(ends) < 4:
        assert time.monotonic() < end
        scheduler.wait(1.0)
        for answer in scheduler.poll():
            key = answer.key
            if answer.what == "lost":
                scheduler.open(key, None, {"trouble": troubles[key]})
            elif answer.what == "open":
                shared[key] = scheduler.open_sessions
                scheduler.call(key, [("look", {"key": "x"})])
            else:
                ends[key] = (answer.failure or answer.result[0][1]).partition(":")[0]
                scheduler.close(key)
    assert ends == dict.fromkeys(troubles, "1") | {"c": failure}
    assert {*shared.values()} == {1} and len(shared) >= 2
    assert scheduler.open_sessions == 0 and len(scheduler._workers) == 1


def test_sessions_wait_for_each_other_beyond_the_maximum(schedule):
    scheduler = schedule(factory=notes(), max_sessions=2, workers=2)
    for key in range(6):
        scheduler.open(key, None, {"prompt": "?", "seed": key})
    over = []
    while len(over) < 6:
        for key in answers(scheduler, 1):
            assert scheduler.open_sessions <= 2
            over.append(key)
            scheduler.close(key)
    assert sorted(over) == [*range(6)]


def test_a_session_that_is_closed_while_it_works_leaves_nothing(schedule):
    scheduler = schedule(factory=notes(lambda key, seed: 0.2))
    scheduler.open("a", None, {"prompt": "?", "seed": 1})
    answers(scheduler, 1)
    scheduler.call("a", [("look", {"key": "x"})])
    scheduler.close("a")
    assert scheduler.pending == 0
    scheduler.open("a", None, {"prompt": "?", "seed": 2})  # the same key, another session
    assert answers(scheduler, 1)["a"].result == " (2)"
    time.sleep(0.4)
    assert scheduler.poll() == [] and scheduler.open_sessions == 1


KILLS = int(os.environ.get("KILLS", "60"))


@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_leave_nothing(schedule):
    """Sessions are opened, called and lost meanwhile; `KILLS=1000` is the long form."""
    scheduler = schedule(factory=notes(lambda key, seed: 0.002), workers=4)
    chance, numbers, kinds = random.Random(0), count(), Counter()

    def begin():
        key = next(numbers)
        scheduler.open(key, None, {"prompt": "?", "seed": key})

    def held():
        own = psutil.Process()
        return np.array([len(own.children(recursive=True)), own.num_fds()])

    nothing = held()
    scheduler.start()
    each = (held() - nothing) / 4
    for _ in range(8):
        begin()
    for kill in range(KILLS):
        alive = [worker for worker in scheduler._workers if worker.ready]
        if alive:
            os.kill(chance.choice(alive).process.pid, signal.SIGKILL)
        answered = 0
        while answered < (64 if kill == KILLS - 1 else 8):
            scheduler.wait(10.0)
            for answer in scheduler.poll():
                answered += 1
                what = (answer.failure or answer.what).partition(":")[0]
                kinds[what] += 1
                if what == "lost":
                    scheduler.open(answer.key, None, {"prompt": "?", "seed": answer.key})
                elif answer.failure:
                    begin()
                elif chance.random() < 0.3:
                    scheduler.close(answer.key)
                    begin()
                else:
                    scheduler.call(answer.key, [("look", {"key": "x"})])
    assert kinds["lost"] and kinds["crashed"] and kinds["call"] > KILLS
    for key in [*scheduler._sessions]:
        scheduler.close(key)
    while scheduler.open_sessions or not all(worker.ready for worker in scheduler._workers):
        scheduler.serve(0.1)
    assert scheduler.pending == 0
    assert (held() == nothing + each * 4).all() and len(scheduler._workers) == 4


class Locked:
    lock = threading.Lock()

    def reset(self):
        pass


class Bomb:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_a_class_that_cannot_be_loaded_is_named(schedule):
    with pytest.raises(UsageError, match=r"Locked.*cannot be sent to a worker"):
        schedule(factory=Locked).start()
    made = partial(lambda bomb: Troubled(), Bomb())
    with pytest.raises(RunFailed, match=r"environment None cannot be loaded.*ZeroDivisionError"):
        schedule(factory=made).start()


def test_hundreds_of_sessions_are_opened_at_once(schedule):
    """More than fit into a pipe: both sides write before they read."""
    scheduler = schedule(factory=notes())
    keys = range(250)
    for key in keys:
        scheduler.open(key, None, {"prompt": "?" * 1000, "seed": key})
    assert len(answers(scheduler, 250, seconds=60)) == 250
    for key in keys:
        scheduler.call(key, [("look", {"key": "x" * 1000})])
    assert all(a.failure is None for a in answers(scheduler, 250, seconds=60).values())


def test_rewards_that_take_long_hold_up_nothing(schedule):
    class Slow:
        def reset(self):
            pass

        def get_reward(self):
            time.sleep(1.5)
            return 1.0

    scheduler = schedule(factory=Slow, timeout=5.0)
    keys = range(8)
    for key in keys:
        scheduler.open(key, None, {})
    answers(scheduler, 8)
    row = {"prompt": "?", "completion": "", "completion_ids": [1], "columns": {}}
    for key in keys:
        scheduler.reward(key, {**row, "trainer_state": None})
    found = answers(scheduler, 8, seconds=10).values()
    assert [a.result[0].score for a in found] == [1.0] * 8


def test_a_worker_that_sends_nonsense_is_replaced(schedule):
    scheduler = schedule(factory=Troubled)
    scheduler.open("a", None, {"trouble": "write"})
    answers(scheduler, 1)
    scheduler.call("a", [("look", {"key": "x"})])
    assert answers(scheduler, 1)["a"].failure.startswith("crashed")
    assert scheduler.open_sessions == 0


async def never(key: str) -> str:
    """Wait.

    Args:
        key: For what.
    """
    await asyncio.sleep(1000)


def test_an_async_call_that_takes_too_long_costs_its_session_alone(schedule):
    scheduler = schedule([never, look], timeout=0.5)
    for key in "ab":
        scheduler.open(key, None, {})
    answers(scheduler, 2)
    scheduler.call("a", [("never", {"key": "x"})])
    assert answers(scheduler, 1)["a"].failure.startswith("timeout")
    scheduler.call("b", [("look", {"key": "x"})])
    assert answers(scheduler, 1)["b"].result == [("look", "1", False)]


class Judged:
    """Its reward hangs in a session of the trouble `hang`, and is 1.0 in others."""

    def reset(self, trouble=None, **columns):
        self.trouble, self.calls = trouble, 0

    def look(self, key: str) -> str:
        """Look something up.

        Args:
            key: What to look up.
        """
        self.calls += 1
        return str(self.calls)

    def get_reward(self):
        if self.trouble == "hang":
            time.sleep(1000)
        if self.trouble == "lock":
            re.match("(a*)*b", "a" * 40)
        if self.trouble == "slow":
            time.sleep(2.0)
        return 1.0


class JudgedLater(Judged):
    async def get_reward(self):
        if self.trouble == "hang":
            await asyncio.sleep(1000)
        return 1.0


ROW = {"prompt": "?", "completion": "", "completion_ids": [1], "columns": {}, "trainer_state": None}


def test_an_async_reward_that_takes_too_long_costs_itself_alone(schedule):
    """Its own time-out ends it, and other sessions of its worker go on where they were."""
    scheduler = schedule(factory=JudgedLater, timeout=60.0)
    for key in "abc":
        scheduler.open(key, None, {"trouble": "hang" if key == "b" else None})
    answers(scheduler, 3)
    scheduler.call("a", [("look", {"key": "x"})])
    answers(scheduler, 1)
    scheduler.reward("b", ROW, 0.3)
    ended = answers(scheduler, 1)["b"]
    assert ended.failure is None and ended.result[0].score is None
    assert ended.result[0].failure == "timeout: no score within 0.3 s"
    scheduler.close("b")
    for key in "ac":
        scheduler.call(key, [("look", {"key": "x"})])
    found = {key: answer.result[0][1] for key, answer in answers(scheduler, 2).items()}
    assert found == {"a": "2", "c": "1"}
    for key in "ac":
        scheduler.reward(key, ROW, 0.3)
    scores = [answer.result[0].score for answer in answers(scheduler, 2).values()]
    assert scores == [1.0] * 2


@pytest.mark.mostly_slow("hang")
@pytest.mark.parametrize("trouble", ["hang", "lock"])
def test_a_reward_that_ends_its_process_fails_as_a_reward(schedule, trouble):
    """Other sessions are opened again, as where a tool hangs."""
    scheduler = schedule(factory=Judged)
    for key in "ab":
        scheduler.open(key, None, {"trouble": trouble})
    answers(scheduler, 2)
    scheduler.reward("a", ROW, 0.3)
    ended = answers(scheduler, 2)
    assert ended["a"].failure is None and ended["a"].result[0].failure.startswith("timeout")
    assert ended["b"].what == "lost"


def test_the_time_out_of_tools_is_not_that_of_rewards(schedule):
    scheduler = schedule(factory=Judged, timeout=0.2)
    scheduler.open("a", None, {"trouble": "slow"})
    answers(scheduler, 1)
    scheduler.reward("a", ROW)
    assert answers(scheduler, 1)["a"].result[0].score == 1.0


GIVES = {
    "words": ["first", "second"],
    "numbers": [7, 8.5, math.inf, None, True],
    "rows": [{"title": "Oslo", "text": "capital"}],
    "nothing": [],
    "parts": [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}],
}
PRINTED = {
    "pairs": [(1, 2), (3, 4)],
    "keys": [{1: "a"}],
    "numbers of numpy": [np.float64(1.5)],
    "objects": [range(3), b"bytes"],
    "dict": {"a": [1]},
    "tuple": (1, "a"),
    "none": None,
    "deep": functools.reduce(lambda inner, _: [inner], range(150), "x"),
    "long": ["x" * (5 << 20)],
}


def give(kind: str) -> list:
    """Give something.

    Args:
        kind: What.
    """
    if kind == "picture":
        return [{"type": "image", "image": object()}]
    if kind == "itself":
        given = []
        given.append(given)
        return given
    if kind == "nowhere":
        return next(value for value in () if value)
    return (GIVES | PRINTED)[kind]


def test_what_a_tool_gives_comes_as_it_gave_it(schedule):
    """A list that JSON keeps is a list, anything else is what `str` makes of it, as in TRL."""
    scheduler = schedule([give])
    scheduler.open("a", None, {})
    answers(scheduler, 1)
    kinds = [*GIVES, *PRINTED, "itself", "picture", "nowhere"]
    scheduler.call("a", [("give", {"kind": kind}) for kind in kinds])
    replies = answers(scheduler, 1)["a"].result
    contents = dict(zip(kinds, (content for _, content, _ in replies), strict=True))
    assert {kind: contents[kind] for kind in GIVES} == GIVES
    printed = {kind: str(given)[: 4 << 20] for kind, given in PRINTED.items()}
    assert {kind: contents[kind] for kind in PRINTED} == printed
    assert contents["itself"] == "[[...]]"
    assert "an image" in contents["picture"] and "StopIteration" in contents["nowhere"]
    assert [failed for _, _, failed in replies] == [False] * (len(kinds) - 2) + [True] * 2
