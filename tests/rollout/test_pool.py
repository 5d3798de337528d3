"""Several engines behind one rollout: what is drawn does not depend on how fast each one is.

Engines in processes of their own are played by `Played`, which runs the code of both sides in this
process and lets the other side be ahead, behind or dead as a random number generator decides.
"""

import pickle
import random
import warnings
from dataclasses import replace

import pytest
from bare_rollout import hooks_of, rollout_on
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines import ProcessEngine, SimulatedEngine, remote
from lit_rlsched.engines import pool as module
from lit_rlsched.engines._engine_server import Server
from lit_rlsched.engines.child import Child, pickled_engine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineDied, EngineSpec
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission, CacheBudget
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, PromptHistory
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Completion, Group, Prompt, Sampling

LIMIT = 24
RULES = {
    "full": lambda prompts, size: FullRound(prompts),
    "window": lambda prompts, size: WindowRound(half(prompts), prompts, 0),
    "window overtaking": lambda prompts, size: WindowRound(half(prompts), prompts, prompts),
    "on policy": lambda prompts, size: SortedRound(half(prompts), prompts, size),
    "partial": lambda prompts, size: SortedRound(half(prompts), prompts, size, mode="partial"),
    "tail": lambda prompts, size: TailRound(half(prompts), size, 1.5),
    "completions race": lambda prompts, size: TailRound(half(prompts), half(size), 1.5, 1.5),
}


def half(n):
    return -(-n // 2)


class PlayedServer(Server):
    """Keeps its answers."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def _send(self, value, raised=False):
        self.answers.append((self._asked, raised, value))


class PlayedChild(Child):
    """An engine's process, played in this one."""

    post = take = wait = strike = end = None  # there is no process

    def __init__(self, chance, mortal):
        self._chance, self._mortal = chance, mortal
        self._asked, self._name = 0, "the engine"
        self.server, self.messages, self.dead = PlayedServer(), [], False

    def _send(self, *message):
        self._maybe_die(message)
        self.messages.append(pickle.loads(pickle.dumps(message)))
        for _ in range(self._chance.choice([0, 0, 1, 5, 50])):
            self._turn()

    def _receive(self):
        self._maybe_die(())
        while not self.server.answers:
            assert self._turn(), "it would wait for ever"
        return self.server.answers.pop(0)

    def _turn(self):
        """One turn of the server's loop; a message may arrive late."""
        if self.messages and not (self.server.runs and self._chance.random() < 0.5):
            self.server.handle(self.messages.pop(0))
            return True
        if self.server.runs:
            self.server.handle(None)
            return True
        return False

    def _maybe_die(self, message):
        begins = message[1:2] in (("start",), ("admission",))
        if not begins and self._mortal and self._chance.random() < 0.03:
            self._mortal.pop()
            self.dead = True
        if self.dead:
            raise EngineDied(self.kill())

    def kill(self):
        self.dead = True
        return "died"

    def close(self):
        self.dead = True


class Played(ProcessEngine):
    """An engine in a process that is played.

    `deaths` is a list that all engines share: as many as it has entries may happen.
    """

    def __init__(self, engine, seed, deaths=()):
        super().__init__(engine)
        self.chance, self.deaths = random.Random(seed), deaths

    def _launch(self):
        self._child = PlayedChild(self.chance, self.deaths)
        self.kv_block, self.kv_capacity = self._child.call(
            "start", pickled_engine(self.engine), self._spec
        )


class Round:
    """A round of groups with random lengths."""

    def __init__(self, seed, prompts, size):
        chance = random.Random(seed)
        self.prompts, self.size = prompts, size
        self.lengths = {
            f"{p}/{i}": chance.randint(1, LIMIT + 4) for p in range(prompts) for i in range(size)
        }

    def groups(self):
        return [
            Group(
                str(p),
                Prompt(str(p), "", (3 + p, 4, 5)),
                Sampling(LIMIT),
                [Completion(i) for i in range(self.size)],
            )
            for p in range(self.prompts)
        ]

    def draw(self, engines, rule, slots, admission=None, predict=False, more=None):
        """Draw it; return the groups, and everything else that must not depend on timing."""
        pool = engines[0] if len(engines) == 1 else EnginePool(engines)
        pool.start(EngineSpec("", slots * len(engines), 64, (1,)))
        try:
            worker = pool.make_worker(admission(slots) if admission else Admission(slots))
            lengths = CalibratedPredictor(PromptHistory()) if predict else None
            groups, hooks = self.groups(), hooks_of(replaces=more is not None)
            if more:
                hooks.another = lambda group, state: more(group)
            predicts = {"seed": 3, "lengths": lengths, "probe_tokens": 4}
            rollout = rollout_on(worker, Unscored(), groups, rule, hooks=hooks, **predicts)
            trace, done = rollout.trace, [g.id for g in rollout.decode()]
            assert not worker.busy and not any(pool.each(lambda one: one.stats().running))
        finally:
            pool.close()
        everyone = {f"{g.id}/{c.index}": c for g in groups for c in g.completions}
        stopped = rollout.state.stopped
        everyone |= {f"{name}/{c.index}": c for name, cs in stopped.items() for c in cs}
        self.check(everyone, trace, slots * len(engines))
        restarts = worker.metrics().get("rollout/engine_restarts")
        assert restarts or 0 <= trace.bubble_ratio < 1  # a virtual clock restarts at 0
        columns = ("request", "slot", "start_step", "end_step", "tokens")
        spans = sorted(zip(*(trace.spans[name] for name in columns), strict=True))
        order = [group.id for group in rollout.state.decoded]
        counts = trace.decode_steps, trace.busy_slot_steps
        return everyone, (done, order, spans, *counts), worker

    def check(self, everyone, trace, slots):
        """Nothing was drawn twice or lost."""
        tokens: dict[str, int] = {}
        for name, drawn in zip(trace.spans["request"], trace.spans["tokens"], strict=True):
            tokens[name] = tokens.get(name, 0) + drawn
        for name, c in everyone.items():
            assert len(c.token_ids) == len(c.logprobs) == tokens.get(name, 0)
            length = min(self.lengths.get(name, LIMIT), LIMIT)
            assert c.finished == (len(c.token_ids) == length)
        assert trace.peak_running <= trace.slots <= slots
        assert trace.dynamic or trace.slots == slots

    def simulated(self, engines, max_jump=None):
        return [self.engine(max_jump) for _ in range(engines)]

    def played(self, engines, seed, deaths=0, max_jump=None):
        fated = [None] * deaths
        return [Played(self.engine(max_jump), f"{seed}/{i}", fated) for i in range(engines)]

    def engine(self, max_jump=None):
        lengths = self.lengths
        return SimulatedEngine(
            lengths=lambda request: lengths.get(request.id, LIMIT), max_jump=max_jump
        )


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch):
    """Rounds of few steps still let the engines wait for each other."""
    monkeypatch.setattr(module, "WINDOW", 3)


rounds = st.builds(Round, st.integers(0, 999), st.integers(1, 7), st.integers(1, 4))
ADMISSIONS = {
    "fifo": Admission,
    "micro groups": lambda slots: Admission(slots, "rounds"),
    "shortest": lambda slots: Admission(slots, order="shortest_first"),
    "budget": lambda slots: Admission(slots, budget=CacheBudget(40, 1, 8)),
}


@pytest.mark.parametrize("predict", [False, True], ids=["plain", "predicted"])
@given(
    rounds,
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from(list(ADMISSIONS)),
    st.integers(0, 999),
    st.integers(0, 2),
)
def test_a_full_round_is_the_same_on_any_number_of_engines(
    predict, round, slots, engines, admission, seed, deaths
):
    admission = ADMISSIONS[admission]
    rule = FullRound(round.prompts)
    alone, *_ = round.draw(round.simulated(1), rule, slots, admission, predict)
    assert all(c.finished for c in alone.values())
    played = round.played(engines, seed, deaths)
    for pool in (round.simulated(engines), played):
        with warnings.catch_warnings(action="ignore"):
            drawn, *_ = round.draw(pool, rule, slots, admission, predict)
        assert drawn == alone


@pytest.mark.mostly_slow("window", "partial", "completions race")
@pytest.mark.parametrize("name", RULES)
@given(rounds, st.integers(1, 3), st.integers(2, 4), st.sampled_from(list(ADMISSIONS)), st.data())
def test_timing_changes_nothing(name, round, slots, engines, admission, data):
    """Not even in rounds that end early, and the simulation draws the same."""
    rule, admission = RULES[name](round.prompts, round.size), ADMISSIONS[admission]
    drawn, figures, worker = round.draw(round.simulated(engines), rule, slots, admission)
    for seed in data.draw(st.lists(st.integers(0, 999), min_size=2, max_size=2)):
        same, same_figures, other = round.draw(round.played(engines, seed), rule, slots, admission)
        assert same == drawn
        assert same_figures == figures
        assert other.metrics()["rollout/moved_requests"] == moved(worker)


def moved(worker):
    return worker.metrics()["rollout/moved_requests"]


@given(rounds, st.integers(1, 2), st.integers(2, 3), st.integers(0, 999))
def test_prompts_that_come_later(round, slots, engines, seed):
    def more_of(waiting):
        return lambda group: waiting.pop() if waiting else None

    def spare():
        return [replace(g, id=f"{g.id}+") for g in round.groups()[:2]]

    rule = FullRound(round.prompts)
    figures = [
        round.draw(pool, rule, slots, more=more_of(spare()))[:2]
        for pool in (round.simulated(engines), round.played(engines, seed))
    ]
    assert figures[0] == figures[1]


def test_a_group_stays_together_and_moves_only_to_a_free_slot():
    round = Round(0, 4, 3)
    round.lengths = {f"{p}/{i}": 20 if p % 2 else 2 for p in range(4) for i in range(3)}
    _, (_, _, spans, steps, _), worker = round.draw(round.simulated(2), FullRound(4), 3, Admission)
    homes = {name: slot // 3 for name, slot, *_ in spans}
    assert [homes[f"{p}/0"] for p in range(3)] == [0, 1, 0]
    assert all(homes[f"{p}/{i}"] == homes[f"{p}/0"] for p in range(3) for i in range(3))
    # engine 0 ends its two short groups in 4 steps, while group 3 waits on engine 1
    assert [homes[f"3/{i}"] for i in range(3)] == [0] * 3
    assert moved(worker) == 3
    begun = {start for name, _, start, *_ in spans if name.startswith("3/")}
    assert begun == {6}, "the third turn, then the sixth: windows of 3"
    assert steps == 26


def test_what_has_drawn_tokens_stays_with_its_engine():
    round = Round(0, 2, 4)
    round.lengths = {f"{p}/{i}": 24 if p else 1 for p in range(2) for i in range(4)}
    budget = ADMISSIONS["budget"]
    _, (_, _, spans, *_), worker = round.draw(round.simulated(2), FullRound(2), 2, budget)
    homes = {}
    for name, slot, *_ in spans:
        assert homes.setdefault(name, slot) == slot
    assert len(spans) > len(homes), "some paused"
    assert moved(worker) > 0


def test_the_bubble_ratio_of_two_engines_by_hand():
    def engine(seconds):
        lengths = {"0/0": 10, "0/1": 4, "1/0": 2, "1/1": 2}
        return SimulatedEngine(lengths, step_time_base=seconds, per_running=0, per_kv_token=0)

    round = Round(0, 2, 2)
    pool = EnginePool([engine(1.0), engine(2.0)])
    pool.start(EngineSpec("", 4, 64, (1,)))
    worker = pool.make_worker(Admission(2))
    rollout = rollout_on(worker, Unscored(), round.groups(), FullRound(2))
    trace = rollout.trace
    list(rollout.decode())
    # engine 0: 4 s with two, 6 s with one. Engine 1: 2 steps of 2 s with two, then 6 s with none
    assert trace.seconds == 10 and trace.slots == 4
    assert trace.bubble_ratio == pytest.approx((6 * 1 + 6 * 2) / (10 * 4))
    assert trace.decode_steps == 10 and trace.slot_steps == 40
    assert trace.busy_slot_steps == trace.tokens == 18
    assert trace.peak_running == 4
    assert trace.steps["engine"] == [0, 1, 0, 0]
    windows = trace.tables()["steps"].to_pydict()
    assert sorted(windows["engine"]) == sorted(trace.steps["engine"])
    assert sum(windows["decode_steps"]) == sum(trace.steps["decode_steps"])


def step(start, end, running, admitted=(), left=None):
    return Step(start, end, running, 0, admitted=list(admitted), left=left or {})


def test_an_engine_that_rests_for_a_while_is_idle():
    trace = RolloutTrace(2, engines=2)
    trace.take_engine_step({0: step(10.0, 11.0, 1, admitted=["a"])})
    trace.take_engine_step({0: step(11.0, 12.0, 1), 1: step(11.5, 13.0, 1, admitted=["b"])})
    trace.take_engine_step({0: step(12.0, 14.0, 1, left={"a": 3})})
    trace.take_engine_step({1: step(16.0, 17.0, 1, left={"b": 2})})
    # engine 0 runs from 0 to 4 s; engine 1 from 1.5 s to 3 s and from 6 s to 7 s
    assert trace.seconds == 7.0 and trace.decode_steps == 4
    assert trace.bubble_ratio == pytest.approx((3 + 1.5 + 3) / (7 * 2))
    assert trace.spans["slot"] == [0, 1]


def test_gradients_overlap_once_with_steps_of_two_engines():
    trace = RolloutTrace(2, engines=2)
    trace.take_engine_step({0: step(0, 4, 1, ["a"], {"a": 1}), 1: step(1, 2, 1, ["b"], {"b": 1})})
    trace.work_times.append((1.0, 5.0))
    assert trace.overlap_seconds == 3.0


def test_the_lead_of_an_engine_is_bounded(monkeypatch):
    """It waits in the middle of a round until its steps were taken."""
    monkeypatch.setattr(remote, "LEAD", 4)
    leads = []

    class Watched(SimulatedEngine):
        def jump(self, steps):
            self.made = getattr(self, "made", 0) + 1
            return super().jump(steps)

    round = Round(0, 2, 1)
    round.lengths = {"0/0": 24, "1/0": 24}
    played = [Played(Watched(lambda request: 24), seed) for seed in range(2)]
    pool = EnginePool(played)
    pool.start(EngineSpec("", 2, 64, (1,)))
    worker = pool.make_worker(Admission(1))

    def interrupt():
        for engine in played:
            while engine.child._turn():  # for as long as it may
                pass
            made = getattr(engine.child.server._engine, "made", 0)
            leads.append(made - worker.trace.decode_steps)

    given = {"check_interrupt": interrupt}
    list(rollout_on(worker, Unscored(), round.groups(), FullRound(2), **given).decode())
    assert max(leads) == 3 or max(leads) == 4
    assert min(leads[2:-8]) > 0, "it is ahead all the time"


def test_an_idle_engine_is_not_asked_to_step():
    """With one group, the other engine has nothing to do."""

    class Resting(SimulatedEngine):
        def jump(self, steps):
            raise AssertionError

    round = Round(0, 1, 2)
    everyone, *_ = round.draw([round.engine(), Resting()], FullRound(1), 2, Admission)
    assert all(c.finished for c in everyone.values())
