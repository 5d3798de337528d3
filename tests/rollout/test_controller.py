import math
import random
from functools import partial

import pytest
from bare_rollout import hooks_of, rollout_on
from hypothesis import given
from hypothesis import strategies as st
from sampled_groups import plan

from lit_rlsched.engines import SimulatedEngine, TransformersEngine
from lit_rlsched.engines.base import RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.requests import completion_seed
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.scheduling.admission import Admission, CacheBudget
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, PromptHistory
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.training.selection import Pilot, Selection, Stop
from lit_rlsched.types import Completion, Event

groups = partial(plan, 16)


def rollout_of(plan, engine, scheduler, slots, refill="continuous", **hooks):
    worker = RolloutWorker(engine, Admission(slots, refill))
    scorer, rule = Scorer(scheduler, lambda ids: str(ids)), FullRound(len(plan))
    return rollout_on(worker, scorer, plan, rule, hooks=hooks_of(**hooks), seed=1)


def simulated(slots, lengths):
    engine = SimulatedEngine(lengths=lengths)
    engine.start(EngineSpec("", slots=slots, max_model_len=64, eos_token_ids=(1,)))
    return engine


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 7),
    st.sampled_from(["continuous", "rounds"]),
    st.randoms(use_true_random=False),
)
def test_every_completion_exactly_once(scheduler, prompts, size, slots, refill, random):
    lengths = {f"{p}@0/{i}": random.randint(1, 16) for p in range(prompts) for i in range(size)}
    plan, seen, ended = groups(prompts, size), [], []
    engine = simulated(slots, lengths)
    run = rollout_of(
        *(plan, engine, scheduler, slots, refill),
        completion_ended=lambda c: seen.append(id(c)),
        group_ended=lambda g: ended.append(g.id),
    )
    done = [g.id for g in run.decode()]
    assert sorted(done) == sorted(ended) == sorted(g.id for g in plan)
    assert sorted(seen) == sorted(id(c) for g in plan for c in g.completions)
    for group in plan:
        for c in group.completions:
            assert len(c.token_ids) == len(c.logprobs) == lengths[f"{group.id}/{c.index}"]
            assert c.scores == [float(len(c.token_ids))]
    trace = run.trace
    assert max(trace.steps["running"]) <= slots
    assert trace.busy_slot_steps == trace.tokens == sum(lengths.values())
    assert not run.session.worker.busy and engine.stats().running == 0


@given(st.data(), st.integers(1, 5))
def test_a_pilot_leaves_no_group_half_done(scheduler, data, slots):
    """Whatever an earlier round, perhaps without a pilot, has begun of it."""
    plan = groups(3, 4)
    for completion in (c for group in plan for c in group.completions):
        begun, over = data.draw(st.sampled_from([(0, 0), (1, 0), (2, 0), (3, 1), (0, 1)]))
        completion.token_ids, completion.logprobs = [5] * begun, [-1.0] * begun
        completion.finish_reason = "stop" if over else None
    whole = {g.id for g in plan if any(c.token_ids or c.finished for c in g.completions[2:])}
    over = [(c, len(c.token_ids)) for g in plan for c in g.completions if c.finished]
    lengths = [data.draw(st.integers(4, 6)) for _ in range(12)]
    engine, pilot = simulated(slots, lengths), Pilot(2, [1.0])
    run = rollout_of(plan, engine, scheduler, slots, stop=pilot, pilot=2)
    assert sorted(group.id for group in run.decode()) == ["0@0", "1@0", "2@0"]
    for group in plan:
        assert all(c.finished and c.scores for c in group.completions)
        assert len(group.completions) == 4 or (group.id not in whole and pilot_equal(group))
    assert all(len(c.token_ids) == before for c, before in over)


def pilot_equal(group):
    return len({len(c.token_ids) for c in group.completions}) == 1 and len(group.completions) == 2


def test_stopping_early_aborts_the_rest(scheduler):
    engine = simulated(4, {f"{p}@0/0": 2 + p for p in range(6)})
    run = rollout_of(groups(6, 1), engine, scheduler, 4)
    assert next(run.decode()).id == "0@0"
    run.cancel()
    session = run.session
    assert engine.stats().running == 0 and not session.worker.busy and session.scorer.pending == 0


def test_the_trainer_hears_of_a_final_group_a_step_later_even_if_its_score_came_at_once(scheduler):
    rule, heard = FullRound(2), {}

    def advanced(state, trace):
        for group in rule.final_groups(state):
            heard.setdefault(group.id, trace.decode_steps)

    lengths = {"0@0/0": 1, "0@0/1": 2, "1@0/0": 5, "1@0/1": 9}  # a step of the engine ends at each
    worker = RolloutWorker(simulated(4, lengths), Admission(4))
    scorer = Scorer(scheduler, str, scores=False)
    rollout_on(worker, scorer, groups(2, 2), rule, hooks=hooks_of(advanced=advanced)).run()
    assert heard == {"0@0": 5}


class NaNEngine(SimulatedEngine):
    """Says that one request's log-probs are not numbers."""

    def step(self):
        return [
            Event(e.request_id, e.token_ids, [math.nan] * len(e.token_ids), e.finish_reason)
            if e.request_id == "1@0/0"
            else e
            for e in super().step()
        ]


def test_a_completion_without_finite_logprobs_is_counted_and_dropped(scheduler):
    engine = NaNEngine(lengths=[3, 4, 5, 2])
    engine.start(EngineSpec("", slots=4, max_model_len=64, eos_token_ids=(1,)))
    plan = groups(2, 2)
    run = rollout_of(plan, engine, scheduler, 4)
    assert len(list(run.decode())) == 2
    assert run.session.drops == {"nonfinite_logprob": 1}
    assert plan[1].completions[0].dropped == "nonfinite_logprob"
    assert plan[1].completions[0].scores == [None]
    assert plan[1].completions[1].dropped is None


def test_seeds_depend_on_what_a_completion_is():
    a, b = groups(2, 2)
    seeds = {
        completion_seed(0, a, a.completions[0], 0),
        completion_seed(1, a, a.completions[0], 0),
        completion_seed(0, b, b.completions[0], 0),
        completion_seed(0, a, a.completions[1], 0),
        completion_seed(0, a, a.completions[0], 1),
        completion_seed(0, a, a.completions[0], 0, "val"),
        completion_seed(0, a, Completion(0, [7]), 0),
    }
    assert len(seeds) == 7
    assert completion_seed(0, a, a.completions[0], 0) == 5659309786280544657  # or runs would change


def test_completions_are_scored_while_others_decode(tiny_policy, scheduler):
    engine = TransformersEngine()
    engine.start(EngineSpec("", slots=2, max_model_len=64, eos_token_ids=(1,), policy=tiny_policy))
    decoding = []
    run = rollout_of(
        *(plan(40, 8, 2), engine, scheduler, 2),
        completion_ended=lambda c: decoding.append(run.session.worker.busy),
    )
    list(run.decode())
    assert len(decoding) == 16
    assert sum(decoding) > 8


# What scores change while a round decodes.


class Coins:
    """0 or 1 by a completion's place; a score comes after as many polls as `delay` says."""

    def __init__(self, delay):
        self._random = random.Random(delay)
        self._delay = delay
        self._waiting = []

    @property
    def pending(self):
        return len(self._waiting)

    def wait(self, timeout=None):
        assert self._waiting, "nothing to wait for"

    def submit(self, group, completion):
        self._waiting.append((group, completion))

    def poll(self):
        waiting, self._waiting = self._waiting, []
        for group, completion in waiting:
            if self._delay and self._random.random() < 0.8:
                self._waiting.append((group, completion))
                continue
            constant = group.prompt.uid.startswith("same")
            completion.scores = [1.0 if constant else float(completion.index % 2)]
            yield group, completion

    def cancel(self, group=None):
        self._waiting = [(g, c) for g, c in self._waiting if group and g is not group]


class Watched(RolloutWorker):
    """Notes where aborted requests were."""

    def __init__(self, *args):
        super().__init__(*args)
        self.aborted = set()

    @property
    def queued(self):
        """What probes or has a quantum that ended."""
        return {request.id for request in self.admission._first}

    def abort(self, request_ids=None):
        ids = set(request_ids or ())
        for i in ids:
            queued = "queued" if i in self.queued else "waiting"
            self.aborted.add("running" if i in self._drawn else queued)
        waiting = len(self.admission) - len(ids - self._drawn.keys())
        events = super().abort(request_ids)
        if ids:
            assert not (self.engine._held.keys() | self.queued | self._drawn.keys()) & ids
            assert len(self.admission) == waiting
        return events


def stopping(plan, admission, lengths, delay, keep=2, probe_tokens=0, more=None, **engine):
    engine = SimulatedEngine(lengths=lengths, **engine)
    engine.start(EngineSpec("", slots=admission.slots, max_model_len=64, eos_token_ids=(1,)))
    predictor = CalibratedPredictor(PromptHistory()) if probe_tokens is not None else None
    worker, ended = Watched(engine, admission), []
    hooks = hooks_of(
        stop=Stop(Selection(keep, reward_range=(0.0, 1.0)), [1.0]),
        group_ended=lambda g: ended.append(g.id),
    )
    if more is not None:
        hooks.replaces, hooks.another = True, lambda group, state: more(group)
    predicts = {"seed": 1, "lengths": predictor, "probe_tokens": probe_tokens or 0}
    run = rollout_on(worker, Coins(delay), plan, FullRound(len(plan)), hooks=hooks, **predicts)
    done = list(run.decode())
    assert not worker.busy and engine.stats().running == 0 and not run._requests.live
    assert sorted(ended) == sorted(g.id for g in done)
    stopped = [c for some in run.state.stopped.values() for c in some]
    drawn = [c for g in done for c in g.completions] + stopped
    assert run.trace.tokens == sum(len(c.token_ids) for c in drawn)
    assert all(len(c.token_ids) == len(c.logprobs) for c in drawn)
    finished = {g.id: [(c.index, len(c.token_ids)) for c in g.completions] for g in done}
    return finished, sorted(len(c.token_ids) for c in stopped), worker.aborted


@given(st.integers(1, 4), st.integers(2, 4), st.booleans(), st.randoms(use_true_random=False))
def test_a_group_stops_as_soon_as_it_can(prompts, keep, stream, random):
    plan, size = groups(prompts, 6), 6
    lengths = {f"{p}@0/{i}": random.randint(1, 16) for p in range(prompts) for i in range(size)}
    for delay in (0, 1):
        copies = [g.copy() for g in plan]
        admission = Admission(prompts * size)
        finished, stopped, _ = stopping(copies, admission, lengths, delay, keep, stream=stream)
        left = []
        for g in plan:
            of = [lengths[f"{g.id}/{i}"] for i in range(size)]
            half = keep // 2
            ends = [  # a pair of counts, and the step after which as many of each have finished
                max(sorted(of[0::2])[zeros - 1], sorted(of[1::2])[keep - zeros - 1])
                for zeros in {half, keep - half}
                if zeros <= 3 and keep - zeros <= 3
            ]
            assert finished[g.id] == [(i, n) for i, n in enumerate(of) if n <= min(ends)]
            left += [min(ends) for n in of if n > min(ends)]
        assert stopped == sorted(left)


ADMISSIONS = {
    "fifo": lambda: Admission(5),
    "rounds": lambda: Admission(5, "rounds"),
    "longest_first": lambda: Admission(5, order="longest_first"),
    "planned": lambda: Admission(5, order="planned"),
    "budget": lambda: Admission(8, budget=CacheBudget(100, 4, 3)),
}


@pytest.mark.mostly_slow("4-planned", "0-budget", "4-fifo")
@pytest.mark.parametrize("kind", ADMISSIONS)
@pytest.mark.parametrize("probe_tokens", [0, 4])
def test_what_waits_or_has_paused_stops_too(kind, probe_tokens):
    where = set()
    for seed_domain in range(12):
        rand = random.Random(seed_domain)
        lengths = {f"{p}@0/{i}": rand.randint(1, 16) for p in range(5) for i in range(6)}
        runs = [
            stopping(groups(5, 6), ADMISSIONS[kind](), lengths, delay, probe_tokens=probe_tokens)
            for delay in (0, 1, 2)
        ]
        assert runs[0] == runs[1] == runs[2]  # however long scores take
        finished, stopped, aborted = runs[0]
        assert sum(map(len, finished.values())) + len(stopped) == 30
        assert stopped
        where |= aborted
    assert {"running", "waiting"} <= where or kind == "budget"
    if probe_tokens or kind == "budget":
        assert "queued" in where or kind == "rounds"


def test_what_replaces_a_group_is_the_same_however_long_scores_take():
    """Fresh groups come in while others decode, and those stop by who has finished first."""
    for seed_domain in range(20):
        rand = random.Random(seed_domain)
        lengths = {f"{p}@0/{i}": rand.randint(1, 16) for p in range(9) for i in range(6)}
        results = []
        for delay in (0, 1, 2):
            plan = groups(9, 6)
            for p in (0, 1, 2, 4):
                object.__setattr__(plan[p].prompt, "uid", f"same{p}")
            fresh = iter(plan[4:])

            def more(group, fresh=fresh):
                return next(fresh, None) if group.prompt.uid.startswith("same") else None

            results.append(stopping(plan[:4], Admission(5), lengths, delay, more=more)[:2])
        assert results[0] == results[1] == results[2]
