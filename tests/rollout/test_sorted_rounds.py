import copy
import io
import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.rollout_worker import RolloutWorker
from lit_rlsched.engines.sampling import counter_uniform
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.audit import PoolAudit, restart_stale, settle
from lit_rlsched.rollout.controller import RolloutController, completion_seed
from lit_rlsched.rollout.planner import RolloutBuffer
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound, at_least
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.types import Completion, Event, Group, Prompt, Sampling, stable_hash

SEED = 1


@dataclass(frozen=True)
class Case:
    update: int
    pool: int
    size: int
    unit: str = "group"
    mode: str = "on_policy"
    max_staleness: int | None = None
    oversubscribe: float | None = None
    slots: int = 1000
    stream: bool = False
    key: str = "id"
    salt: int = 0
    limit: int = 20

    @property
    def rule(self):
        return SortedRound(
            self.update,
            self.pool,
            self.size,
            self.unit,
            self.mode,
            self.max_staleness,
            self.oversubscribe,
        )

    def length(self, request):
        """One in five ends at once; some would be longer than they may."""
        drawn = stable_hash(self.salt, getattr(request, self.key))
        return 1 if drawn % 5 == 0 else 1 + drawn // 5 % (self.limit + 4)


@st.composite
def cases(draw, **fixed):
    update = draw(st.integers(1, 5))
    mode = fixed.get("mode") or draw(st.sampled_from(["on_policy", "partial"]))
    drawn = {
        "update": update,
        "pool": draw(st.integers(update, 12)),
        "size": draw(st.integers(1, 3)),
        "unit": draw(st.sampled_from(["group", "completion"])),
        "mode": mode,
        "max_staleness": draw(st.none() | st.integers(1, 3)) if mode == "partial" else None,
        "oversubscribe": draw(st.none() | st.floats(1, 3)),
        "slots": draw(st.integers(1, 40)),
        "stream": draw(st.booleans()),
        "key": draw(st.sampled_from(["id", "seed"])),
        "salt": draw(st.integers(0, 2**32)),
    }
    return Case(**{**drawn, **fixed})


class Stopped(Exception):
    pass


class Engine(SimulatedEngine):
    """Stops when it is stepped once too often."""

    steps_left = math.inf

    def step(self):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Stopped
        return super().step()


class Scores:
    """Come whenever; every third completion gets none."""

    def __init__(self):
        self._waiting = []
        self._random = random.Random(0)

    @property
    def pending(self):
        return len(self._waiting)

    def wait(self, timeout=None):
        pass

    def submit(self, group, completion):
        self._waiting.append((group, completion))

    def poll(self):
        waiting, self._waiting = self._waiting, []
        for group, completion in waiting:
            if self._random.random() < 0.5:
                self._waiting.append((group, completion))
                continue
            length = len(completion.token_ids)
            completion.scores = [None if length % 3 == 0 else float(length)]
            yield group, completion

    def cancel(self, group=None):
        self._waiting = [(g, c) for g, c in self._waiting if group and g is not group]


@dataclass
class Drawn:
    """A round, and the pool and the trace it left."""

    version: int
    plan: list[Group]
    trained: list[Group]
    left: list[Group]
    harvest: object
    trace: object
    yielded: list[str]

    @property
    def lengths(self):
        return [len(c.token_ids) for g in self.trained for c in g.completions]


@dataclass
class Run:
    """The data module's rounds, a policy version each, without a model."""

    case: Case
    rule: object = None
    pool: RolloutBuffer = field(default_factory=RolloutBuffer)
    version: int = 0
    calls: list = field(default_factory=list)

    def __post_init__(self):
        case = self.case
        self.rule = self.rule or case.rule
        self.audit = PoolAudit()
        self.prompts = {}
        self.engine = Engine(lengths=case.length, stream=case.stream)
        self.engine.start(EngineSpec("", case.slots, 8 + case.limit, (1,)))
        worker = RolloutWorker(self.engine, Admission(case.slots))
        self.controller = RolloutController(worker, Scores(), seed=SEED)

    def plan(self):
        for _ in range(self.rule.fresh_prompts(list(self.pool))):
            n = len(self.prompts)
            prompt = Prompt(f"p{n:03}", f"prompt {n}", (4 + n % 10, 5))
            self.prompts[prompt.uid] = prompt
            completions = [Completion(i) for i in range(self.case.size)]
            group = Group(f"{prompt.uid}@0", prompt, Sampling(self.case.limit), completions)
            self.calls.append(("load", group.id))
            self.pool.add(group)
        return [group.copy() for group in self.rule.plan(list(self.pool))]

    def round(self, groups_until_close=None):
        plan, worker = self.plan(), self.controller.worker
        stale = restart_stale(plan, self.version, self.rule)
        planned = copy.deepcopy(plan)
        self.engine.sync_weights([], self.version)
        trace, yielded = worker.start_trace(), []
        run = self.controller.run(plan, self.rule, self.version)
        for group in run:
            yielded.append(group.id)
            if len(yielded) == groups_until_close:
                run.close()
                raise Stopped
        harvest = settle(plan, self.rule, self.controller.state, stale)
        trained = copy.deepcopy(harvest.trained)
        self.pool.settle(plan, harvest.left)
        self.calls += [("train", g.id) for g in trained]
        self.audit.add(harvest, trace)
        self.version += 1
        left = copy.deepcopy(list(self.pool))
        return Drawn(self.version - 1, planned, trained, left, harvest, trace, yielded)

    def whole_pool(self):
        rounds = [self.round()]
        while len(self.pool):
            rounds.append(self.round())
            assert len(rounds) < 100, "starved"
        return rounds

    @property
    def idle(self):
        return (
            not self.controller.worker.busy
            and self.engine.stats().running == 0
            and self.controller.scorer.pending == 0
            and not self.controller._live
        )


def finished_at(round):
    """The decode step after which each completion that ran was gone."""
    spans = round.trace.spans
    return dict(zip(spans["request"], spans["end_step"], strict=True))


@given(cases())
def test_every_completion_is_trained_on_once_a_pool(case):
    run = Run(case)
    for pool in range(2):
        rounds = run.whole_pool()
        trained = [(g.id, c.index) for r in rounds for g in r.trained for c in g.completions]
        prompts = range(pool * case.pool, (pool + 1) * case.pool)
        assert sorted(trained) == [(f"p{n:03}@0", i) for n in prompts for i in range(case.size)]
        for r in rounds:
            done = [c for g in r.trained for c in g.completions]
            assert done and all(c.finished and c.scored and c.token_ids for c in done)
            assert {c.finish_reason for c in done} <= {"stop", "length"}
            for c in done:
                assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
                assert c.finish_reason == "stop" or len(c.token_ids) == case.limit
    assert run.idle


@given(cases())
def test_no_fresh_prompt_before_the_pool_is_empty(case):
    run = Run(case)
    for _ in range(2):
        run.whole_pool()
    waiting, loaded = {}, 0
    for i, (what, group_id) in enumerate(run.calls):
        if what == "load":
            assert not waiting or run.calls[i - 1][0] == "load"
            waiting[group_id] = case.size
            loaded += 1
        else:
            last = not any(call == (what, group_id) for call in run.calls[i + 1 :])
            if last:
                del waiting[group_id]
    assert not waiting and loaded == 2 * case.pool


@given(cases())
def test_nobody_starves(case):
    rounds = Run(case).whole_pool()
    assert len(rounds) <= math.ceil(case.pool / case.update)
    for i, r in enumerate(rounds):
        assert all(c.attempts <= i for g in r.trained for c in g.completions)
        units = len(r.trained) if case.unit == "group" else len(r.lengths)
        enough = case.update if case.unit == "group" else case.update * case.size
        assert units >= enough or not r.left


def test_nobody_starves_of_half_trained_groups():
    case = Case(2, 12, 4, unit="completion", oversubscribe=1.5)
    assert len(Run(case).whole_pool()) <= 6


@given(cases())
def test_a_round_ends_with_the_step_that_has_enough(case):
    run = Run(case)
    for r in run.whole_pool():
        at = finished_at(r)
        steps = [[at.get(f"{g.id}/{c.index}", 0) for c in g.completions] for g in r.trained]
        before = sum(max(group) < r.trace.decode_steps for group in steps)
        enough = case.update
        if case.unit == "completion":
            before = sum(step < r.trace.decode_steps for group in steps for step in group)
            enough *= case.size
            assert not any(c.finished for g in r.left for c in g.completions)
        assert before < enough


@given(cases(unit="group"))
def test_a_group_is_trained_on_as_a_whole(case):
    for r in Run(case).whole_pool():
        assert all([c.index for c in g.completions] == list(range(case.size)) for g in r.trained)
        assert all([c.index for c in g.completions] == list(range(case.size)) for g in r.left)
        assert sorted(r.yielded) == [g.id for g in r.trained]


@given(cases())
def test_a_round_takes_the_front_of_the_pool_and_keeps_its_order(case):
    waiting = [f"p{n:03}@0" for n in range(case.pool)]
    most = case.pool if case.oversubscribe is None else at_least(case.oversubscribe, case.update)
    for r in Run(case).whole_pool():
        size = len(r.plan)
        assert [g.id for g in r.plan] == waiting[:size] and size >= min(most, len(waiting))
        assert case.unit == "completion" or size <= most
        waiting = [g.id for g in r.left]
        for groups in (r.plan, r.trained, r.left):
            ids = [(g.id, c.index) for g in groups for c in g.completions]
            assert ids == sorted(ids)


@given(cases(mode="on_policy"))
def test_on_policy_trains_on_the_newest_policy_alone(case):
    run = Run(case)
    for _ in range(2):
        for r in run.whole_pool():
            for c in (c for g in r.trained for c in g.completions):
                assert c.segments == [(r.version, len(c.token_ids))]
                assert len(c.logprobs) == len(c.token_ids)
            for c in (c for g in r.left for c in g.completions):
                assert c == Completion(c.index, attempts=c.attempts)


def drawn_logprobs(group, completion, start, tokens, version):
    """What the engine's noise is for these tokens, drawn under a version after so many."""
    so_far = Completion(completion.index, completion.token_ids[:start])
    seed = completion_seed(SEED, group, so_far, version)
    noise = counter_uniform(torch.tensor(seed), torch.arange(start, start + tokens))
    return np.log1p(-noise.numpy()).tolist()


@given(cases(mode="partial"))
def test_partial_keeps_who_drew_each_token(case):
    run, most = Run(case), case.max_staleness
    for _ in range(2):
        first = run.version
        for r in run.whole_pool():
            for group, c in ((g, c) for g in [*r.trained, *r.left] for c in g.completions):
                versions = [version for version, _ in c.segments]
                assert len(c.logprobs) == len(c.token_ids) == sum(n for _, n in c.segments)
                assert versions == sorted(set(versions))
                assert all(first <= v <= r.version for v in versions)
                start = 0
                for version, tokens in c.segments:
                    expected = drawn_logprobs(group, c, start, tokens, version)
                    assert list(c.logprobs[start : start + tokens]) == expected
                    start += tokens
            if most is not None:
                assert all(c.staleness(r.version) <= most for g in r.trained for c in g.completions)


@given(cases(mode="partial", max_staleness=None))
def test_partial_throws_nothing_away(case):
    run = Run(case)
    rounds = run.whole_pool()
    assert not any(r.harvest.discarded for r in rounds)
    assert sum(sum(r.lengths) for r in rounds) == sum(r.trace.tokens for r in rounds)
    assert run.audit.metrics()["pool/useful_token_share"] == 1.0
    assert run.audit.metrics()["pool/trained_over_drawn_length"] == pytest.approx(1.0)
    assert all(c.attempts == 0 for r in rounds for g in r.trained for c in g.completions)


@given(cases())
def test_every_token_is_trained_on_or_counted_as_discarded(case):
    run = Run(case)
    rounds = run.whole_pool()
    discarded = [a for r in rounds for a in r.harvest.discarded]
    drawn = sum(r.trace.tokens for r in rounds)
    assert drawn == sum(sum(r.lengths) for r in rounds) + sum(a.tokens for a in discarded)
    assert len(discarded) == sum(
        c.attempts for r in rounds for g in r.trained for c in g.completions
    )
    assert run.audit.metrics()["pool/rounds"] == len(rounds)


@given(cases(), st.booleans(), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=4))
def test_a_round_cut_short_is_drawn_again_as_a_whole(case, stream, stops):
    run, twin = Run(case), Run(replace(case, stream=stream))
    for i in range(4):
        if i < len(stops):
            run.plan()  # loads what is to be loaded
            before = copy.deepcopy(list(run.pool))
            by_close, count = stops[i]
            run.engine.steps_left = math.inf if by_close else count
            try:
                run.round(groups_until_close=count if by_close else None)
            except Stopped:
                assert run.idle and list(run.pool) == before
            else:  # it was over before
                twin.round()
            run.engine.steps_left = math.inf
        again, plain = run.round(), twin.round()
        assert again.trained == plain.trained
        assert again.left == plain.left and list(run.pool) == list(twin.pool)
        assert again.harvest == plain.harvest
        assert again.trace.spans["tokens"] == plain.trace.spans["tokens"]


@given(cases(), st.integers(1, 4))
def test_how_an_engine_tells_does_not_matter(case, max_jump):
    run, twin = Run(case), Run(replace(case, stream=True))
    twin.engine.max_jump = max_jump
    for r, other in zip(run.whole_pool(), twin.whole_pool(), strict=True):
        assert (r.trained, r.left, r.harvest) == (other.trained, other.left, other.harvest)
        assert r.trace.decode_steps == other.trace.decode_steps


@given(cases())
def test_a_pool_goes_on_after_a_checkpoint(case):
    run, rounds = Run(case), Run(case).whole_pool()
    for expected in rounds:
        r = run.round()
        assert (r.trained, r.left) == (expected.trained, expected.left)
        file = io.BytesIO()
        torch.save([run.pool.state_dict(), run.audit.state_dict()], file)
        file.seek(0)
        pool, audit = torch.load(file, weights_only=True)
        resumed = Run(case, version=run.version)
        resumed.prompts, resumed.audit = run.prompts, PoolAudit.from_state(audit)
        resumed.pool.load_state_dict(pool, run.prompts.__getitem__)
        assert list(resumed.pool) == list(run.pool)
        run = resumed
    assert not len(run.pool) and run.audit.rounds == len(rounds)


@given(cases(oversubscribe=None, max_staleness=None))
def test_a_pool_of_one_update_is_a_plain_round(case):
    case = replace(case, update=case.pool)
    run, plain = Run(case), Run(case, rule=FullRound(case.pool))
    for _ in range(2):
        r, other = run.round(), plain.round()
        assert r.trained == other.trained and not r.left
        assert r.trace.spans == other.trace.spans
        assert r.harvest == other.harvest


def test_what_was_begun_goes_on_before_others_begin():
    run = Run(Case(1, 3, 2, mode="partial", slots=1))
    plan = run.plan()
    for group in plan[1:]:
        group.completions[1].take(Event("", [5, 6], [-1.0, -1.0]), version=0)
    trace = run.controller.worker.start_trace()
    list(run.controller.run(plan, FullRound(3), version=1))
    turns = ["p001@0/1", "p002@0/1", "p000@0/0", "p000@0/1", "p001@0/0", "p002@0/0"]
    assert trace.spans["request"] == turns


@given(cases())
def test_no_slot_is_idle_while_others_wait(case):
    for r in Run(case).whole_pool():
        steps, ends = r.trace.steps, r.trace.spans["end_step"]
        live = sum(not c.finished for g in r.plan for c in g.completions)
        start = 0
        for running, jump in zip(steps["running"], steps["decode_steps"], strict=True):
            assert running == min(case.slots, live - sum(end <= start for end in ends))
            start += jump


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
@pytest.mark.parametrize("unit", ["group", "completion"])
def test_only_the_last_rounds_of_a_pool_drain(mode, unit):
    case = Case(4, 24, 2, unit, mode, slots=6)
    ratios = [r.trace.bubble_ratio for r in Run(case).whole_pool()]
    assert len(ratios) > 3
    assert ratios[0] == ratios[1] == ratios[2] == 0.0 < ratios[-1]
    synchronous = Run(replace(case, pool=4)).whole_pool()[0]
    assert synchronous.trace.bubble_ratio > 0


def test_the_short_go_first_where_all_decode():
    for salt in range(20):
        case = Case(3, 15, 2, "completion", "partial", salt=salt)
        lengths = [r.lengths for r in Run(case).whole_pool()]
        assert [n for update in lengths for n in sorted(update)] == sorted(
            n for update in lengths for n in update
        )
        assert all(max(a) < min(b) for a, b in pairwise(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["on_policy", "partial"])
@pytest.mark.parametrize("unit", ["group", "completion"])
def test_updates_of_a_pool_grow(mode, unit):
    updates = [[], [], [], []]
    for salt in range(40):
        case = Case(4, 16, 2, unit, mode, key="seed", salt=salt, limit=300)
        for update, r in zip(updates, Run(case).whole_pool(), strict=False):
            update.append(fmean(r.lengths))
    means = [fmean(update) for update in updates]
    assert means == sorted(means) and means[-1] > 2 * means[0]


def test_on_policy_is_biased_towards_the_short_and_says_so():
    """A completion that is drawn anew forgets that it was a long one."""
    case = Case(4, 16, 2, key="seed", limit=300)
    runs = [Run(replace(case, salt=salt)) for salt in range(20)]
    trained = fmean(n for run in runs for r in run.whole_pool() for n in r.lengths)
    whole = [Run(replace(case, update=16, salt=salt)).round() for salt in range(20)]
    bias = trained / fmean(n for r in whole for n in r.lengths)
    said = fmean(run.audit.metrics()["pool/trained_over_drawn_length"] for run in runs)
    assert bias < 0.8
    # of what was cut off when it was first drawn, no more is known than that it was longer
    assert bias < said < 0.8
