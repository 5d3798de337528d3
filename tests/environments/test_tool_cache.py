"""Replies from the cache are those that the object would give, and none is computed twice."""

import random
from collections import Counter
from pathlib import Path

import pytest

from lit_rlsched.environments import tool_cache
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.environments.tool_cache import CachingScheduler


def counting(file, moody=False):
    """Return a cacheable class and function that write down what they compute."""

    class Game:
        cacheable = True

        def reset(self, level: int, **columns) -> str:
            self.moves = f"{level}"
            self._note()
            return f"level {level}"

        def move(self, way: str) -> str:
            """Move.

            Args:
                way: Where to.
            """
            self.moves += way
            self._note()
            if way == "x":
                raise ValueError("a wall")
            return f"{self.moves}{random.random() if moody else ''}"

        def _note(self):
            with Path(file).open("a") as lines:
                lines.write(f"{self.moves}\n")

    def double(text: str) -> str:
        """Double it.

        Args:
            text: What to double.
        """
        with Path(file).open("a") as lines:
            lines.write(f"double {text}\n")
        return text * 2

    double.cacheable = True
    return Environments([double], Game)


@pytest.fixture
def start(tmp_path):
    made = []

    def start(**settings):
        file = tmp_path / "computed"
        file.touch()
        scheduler = CachingScheduler(counting(str(file), **settings), workers=2, timeout=10.0)
        made.append(scheduler)
        return scheduler, lambda: Counter(file.read_text().split("\n")[:-1])

    yield start
    for scheduler in made:
        scheduler.shut_down()


def play(scheduler, moves, chance):
    """Let each session make its moves, answers in any order; return what each was told."""
    told = {key: [] for key in moves}
    for key in moves:
        scheduler.open(key, None, {"level": key % 2})
    while any(len(told[key]) <= len(moves[key]) for key in moves):
        scheduler.wait(10.0)
        answers = scheduler.poll()
        chance.shuffle(answers)
        for answer in answers:
            assert answer.failure is None and answer.what != "lost"
            told[answer.key].append(answer.result)
            if (done := len(told[answer.key]) - 1) < len(moves[answer.key]):
                scheduler.call(answer.key, moves[answer.key][done])
    return told


@pytest.mark.parametrize("seed", range(3))
def test_replies_are_the_object_s_and_nothing_is_computed_twice(start, seed):
    chance = random.Random(seed)
    scheduler, computed = start()

    def turn():
        calls = [("move", {"way": way}) for way in chance.choices("ab", k=chance.randint(0, 2))]
        return calls or [("double", {"text": chance.choice("cd")})]

    moves = {key: [turn() for _ in range(chance.randint(1, 4))] for key in range(24)}
    told = play(scheduler, moves, chance)
    for key, turns in moves.items():
        path = str(key % 2)
        assert told[key][0] == f"level {path}"
        for calls, replies in zip(turns, told[key][1:], strict=True):
            for (name, arguments), (named, reply, failed) in zip(calls, replies, strict=True):
                path += arguments.get("way", "")
                assert (named, failed) == (name, False)
                assert reply == (path if name == "move" else arguments["text"] * 2)
    once = computed()
    assert all(n == 1 for line, n in once.items() if line.startswith("double"))
    assert scheduler.cache["hits"] > 12
    lookups = scheduler.cache["lookups"]
    assert lookups == sum(map(len, moves.values()))
    # a session with its own end has made its calls; those of the others are all there already
    for key in moves:
        scheduler.close(key)
    assert scheduler.pending == 0
    again = play(scheduler, {key + 100: of for key, of in moves.items()}, chance)
    assert [*again.values()] == [*told.values()] and computed() == once


def test_errors_are_not_kept_and_little_is_kept_at_once(start, monkeypatch):
    scheduler, computed = start()
    wall = [[("move", {"way": "x"})]]
    told = play(scheduler, {0: wall, 2: wall, 4: wall}, random.Random())
    assert all(replies[1][0][2] for replies in told.values()) and computed()["0x"] == 3
    monkeypatch.setattr(tool_cache, "MAX_BYTES", 3 * tool_cache.OVERHEAD)
    play(scheduler, {6: [[("double", {"text": c})] for c in "abcdefgh"]}, random.Random())
    assert len(scheduler._kept) == 2 and scheduler._bytes < 3 * tool_cache.OVERHEAD


def test_a_session_that_ends_hands_its_work_to_those_that_wait_for_it(start):
    scheduler, _ = start()
    for key in (0, 2, 4):
        scheduler.open(key, None, {"level": 0})
    scheduler.close(0)
    answers = []
    while len(answers) < 2 and scheduler.wait(10.0):
        answers += scheduler.poll()
    assert {(a.key, a.result) for a in answers} == {(2, "level 0"), (4, "level 0")}


def test_a_class_that_answers_otherwise_is_cached_no_more(start):
    scheduler, computed = start(moody=True)
    once = [[("move", {"way": "a"})]]
    play(scheduler, {0: once, 2: once}, random.Random())
    (late,) = (key for key, session in scheduler._own.items() if session.skipped)
    scheduler.call(late, [("move", {"way": "b"})])  # which moves to `a` again before
    answers = []
    while not answers and scheduler.wait(10.0):
        answers = scheduler.poll()
    assert [answer.what for answer in answers] == ["lost"]
    scheduler.close(late)
    before = computed()["0a"]
    play(scheduler, {4: once, 6: once}, random.Random())
    assert computed()["0a"] == before + 2
