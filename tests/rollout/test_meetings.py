"""The trainer and a rollout in another thread meet at turns, however fast each of them is."""

import random
import threading
import time
from types import SimpleNamespace

import pytest

from lit_rlsched.rollout.meetings import Meetings


class Rollout:
    """Makes turns and notes the weights of each; the trainer changes them where they meet."""

    def __init__(self, meetings, turns, seed=None):
        self.meetings, self.turns, self.weights = meetings, turns, 0
        self.drawn, self.allowed, self.error = [], [], None
        self.chance = None if seed is None else random.Random(seed)
        self.trace = SimpleNamespace(decode_steps=0)
        self.stops = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def allow(self, turns):
        self.allowed.append(turns)

    def heed(self):
        if self.stops:
            raise InterruptedError

    def run(self):
        try:
            while self.trace.decode_steps < self.turns:
                self.meetings.before_step(self, self.heed)
                if self.chance:
                    time.sleep(self.chance.random() / 500)
                self.drawn.append(self.weights)
                self.trace.decode_steps += 1
        except InterruptedError as error:
            self.error = error
        finally:
            self.meetings.end()

    def train(self, updates, chance=None):
        met = []
        for version in range(1, updates + 1):
            if chance:
                time.sleep(chance.random() / 100)
            with self.meetings.trainer() as there:
                if there:
                    self.weights = version
                met.append(there)
        self.meetings.release()
        self.thread.join(60)
        assert not self.thread.is_alive()
        return met


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_weights_change_at_the_same_turns_whatever_the_timing(seed):
    rollout = Rollout(Meetings("turns", 4), 19, seed)
    assert rollout.train(3, seed is not None and random.Random(seed)) == [True] * 3
    assert rollout.drawn == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 7
    assert rollout.meetings.switches == [4, 8, 12]
    assert rollout.allowed == [4] * 5
    assert rollout.meetings.rollout_seconds > 0 < rollout.meetings.trainer_seconds


def test_a_rollout_that_is_over_gets_no_more_weights():
    rollout = Rollout(Meetings("turns", 4), 7)
    assert rollout.train(3) == [True, False, False]
    assert rollout.drawn == [0] * 4 + [1] * 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_free_run_is_replayed(seed):
    free = Rollout(Meetings("free", 2), 40, seed)
    met = free.train(4, random.Random(seed))
    switches = free.meetings.switches
    assert met[0] and len(switches) == sum(met)
    assert all(turn % 2 == 0 for turn in switches)
    again = Rollout(Meetings("free", 2, switches), 40)
    assert again.train(4) == met
    assert again.drawn == free.drawn
    assert again.meetings.switches == switches and again.allowed == free.allowed


def test_without_a_trainer_it_waits_until_it_is_released():
    rollout = Rollout(Meetings("turns", 2), 9)
    while not rollout.meetings._here:
        time.sleep(0.001)
    assert rollout.drawn == [0] * 2
    assert rollout.train(0) == []
    assert rollout.drawn == [0] * 9


def test_what_interrupts_a_wait_ends_it(monkeypatch):
    monkeypatch.setattr("lit_rlsched.rollout.meetings.POLL", 0.01)
    rollout = Rollout(Meetings("turns", 2), 9)
    rollout.stops = True
    rollout.thread.join(60)
    assert isinstance(rollout.error, InterruptedError)
    assert rollout.train(1) == [False]


def test_the_trainer_lets_go_after_an_error():
    rollout = Rollout(Meetings("turns", 2), 9)
    with pytest.raises(ZeroDivisionError), rollout.meetings.trainer():
        raise ZeroDivisionError
    assert rollout.meetings.switches == []
    assert rollout.train(1) == [True]
    assert rollout.drawn == [0] * 4 + [1] * 5
