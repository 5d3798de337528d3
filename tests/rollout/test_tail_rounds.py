import copy
import io
import math
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.data.source import DomainSource
from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.rollout_worker import RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.audit import DraftAudit, restart_stale, settle
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.scoring import Feedback
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.racing import PATIENCE, quotas
from lit_rlsched.scheduling.recorded_lengths import LogNormalLengths
from lit_rlsched.scheduling.round_rule import FullRound, RoundState
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sampling, stable_hash

SEED = 1

races = pytest.mark.parametrize("completion_ratio", [1.0, 1.25])


@dataclass(frozen=True)
class Case:
    update: int
    size: int
    prompt_ratio: float = 1.25
    completion_ratio: float = 1.0
    patience: float = PATIENCE
    slots: int = 1000
    stream: bool = False
    key: str = "id"
    salt: int = 0
    limit: int = 20
    spare: int = 3
    """Prompts of the data beyond those that may wait at once."""
    latency: int = 3
    """Most turns of the loop until a score comes."""
    haste: int = 0
    """Another one, other latencies."""
    reuse_drafts: bool = False
    max_deferrals: int | None = None
    whole: int = 0
    """So many of ten drafts are kept whole."""
    useless: int = 0
    """One in so many prompts teaches nothing and is replaced, however often."""
    bad: int = 0
    """One in so many completions has a log-prob that is not finite."""

    @property
    def rule(self):
        return self.with_shares(None)

    def with_shares(self, shares):
        ratios = self.prompt_ratio, self.completion_ratio
        settings = (self.update, self.size, *ratios, self.patience, self.reuse_drafts, shares)
        if self.max_deferrals is None:
            return TailRound(*settings)
        return DeferringTailRound(*settings, max_deferrals=self.max_deferrals)

    @property
    def raced(self):
        return self.rule.most_prompts()

    def length(self, request):
        """One in five ends at once; some would be longer than they may."""
        drawn = stable_hash(self.salt, getattr(request, self.key))
        return 1 if drawn % 5 == 0 else 1 + drawn // 5 % (self.limit + 4)


@st.composite
def cases(draw, **fixed):
    drawn = {
        "update": draw(st.integers(1, 5)),
        "size": draw(st.integers(1, 3)),
        "prompt_ratio": draw(st.floats(1, 3)),
        "completion_ratio": draw(st.just(1.0) | st.floats(1, 3)),
        "patience": draw(st.sampled_from([PATIENCE, 0.0])),
        "slots": draw(st.integers(1, 40)),
        "stream": draw(st.booleans()),
        "key": draw(st.sampled_from(["id", "seed"])),
        "salt": draw(st.integers(0, 2**32)),
        "spare": draw(st.integers(0, 6)),
        "latency": draw(st.integers(0, 12)),
        "reuse_drafts": draw(st.booleans()),
        "max_deferrals": None,
    }
    return Case(**{**drawn, **fixed})


@st.composite
def any_cases(draw, **fixed):
    """Also those in which what lost goes on beside fresh prompts."""
    case = draw(cases(**fixed))
    most = draw(st.sampled_from([None, 1, 2, 5]))
    return replace(case, max_deferrals=most, reuse_drafts=bool(most) or case.reuse_drafts)


class Stopped(Exception):
    pass


class Engine(SimulatedEngine):
    """Stops when it is stepped once too often; some log-probs are not finite."""

    steps_left = math.inf
    bad = 0

    def step(self):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Stopped
        events = super().step()
        for event in events:
            name = stable_hash(event.request_id, self.version)
            if self.bad and event.finish_reason and name % self.bad == 0:
                event.logprobs[-1] = math.nan
        return events


def accept_some(groups, version, limit, whole=0):
    """Stands in for the verification: some of each draft, and a token in place of the next.

    Of `whole` in ten drafts, all.
    """
    audit, replaced = DraftAudit(), 0
    for group in groups:
        for completion in (c for c in group.completions if c.draft):
            draft, completion.draft = completion.draft, None
            assert draft.versions[-1] < version
            n = stable_hash("accept", group.id, completion.index) % (len(draft.token_ids) + 1)
            if stable_hash("whole", group.id, completion.index, version) % 10 < whole:
                n = len(draft.token_ids)
            audit += DraftAudit(len(draft.token_ids), n, n == len(draft.token_ids))
            completion.token_ids, completion.logprobs = draft.token_ids[:n], draft.logprobs[:n]
            if n < len(draft.token_ids):
                completion.token_ids.append(9)
                completion.logprobs.append(-0.5)
                replaced += 1
            n = len(completion.token_ids)
            completion.segments = [(version, n)]
            ends = completion.token_ids[-1] == 1
            completion.finish_reason = "stop" if ends else "length" if n == limit else None
    return audit, replaced


class Scores:
    """Come some turns later, whoever waits for them; of `late` prompts, very much later."""

    def __init__(self, latency, haste=0, late=()):
        self.due = []
        self._latency, self._haste, self._late, self._now = latency, haste, late, 0

    @property
    def pending(self):
        return len(self.due)

    def submit(self, group, completion):
        name = group.id, completion.index, list(completion.token_ids)
        turns = stable_hash(self._haste, *name) % (self._latency + 1)
        if group.prompt.uid in self._late:
            turns = 10**6
        self.due.append((self._now + turns, group, completion))

    def wait(self, timeout=None):
        assert self.due, "nothing to wait for"
        if timeout is None or timeout > 0:
            self._now = max(self._now, min(due for due, _, _ in self.due))

    def poll(self):
        waiting, self.due, arrived = self.due, [], []
        for item in waiting:
            (arrived if item[0] <= self._now else self.due).append(item)
        self._now += 1
        for _, group, completion in arrived:
            length = len(completion.token_ids)
            completion.scores = [None if length % 3 == 0 else float(length)]
            yield group, completion

    def cancel(self, group=None):
        self.due = [(n, g, c) for n, g, c in self.due if group and g is not group]


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
    before: int
    """Prompts that had lost and waited when it began."""
    long: bool
    replaced: int
    """Tokens that were drawn in place of rejected ones."""

    @property
    def useful(self):
        return [g for g in self.trained if not all(c.dropped for c in g.completions)]


@dataclass
class Run:
    """The data module's rounds, a policy version each, without a model."""

    case: Case
    rule: object = None
    pool: RolloutBuffer = field(default_factory=RolloutBuffer)
    version: int = 0
    late: tuple = ()
    shuffle: bool = True

    def __post_init__(self):
        case = self.case
        self.rule = self.rule or case.rule
        n = case.rule.most_prompts() + case.rule.most_deferred + case.spare
        domains = [d or "x" for d in getattr(self.rule, "quotas", "x")]
        prompts = [
            Prompt(f"{d}{i:03}", f"prompt {d}{i}", (4 + i % 10, 5), {"domain": d})
            for i in range(n)
            for d in domains
        ]
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.rule.check_enough(len(prompts))
        self.rule.check_domains(prompts)
        self.planner = RoundPlanner(self.pool, Sampling(case.limit), case.size)
        self.planner.connect(DomainSource(prompts, SEED, self.shuffle, self.rule.domain_of))
        self.engine = Engine(lengths=case.length, stream=case.stream)
        self.engine.bad = case.bad
        self.engine.start(EngineSpec("", case.slots, 8 + case.limit, (1,)))
        worker = RolloutWorker(self.engine, Admission(case.slots))
        self.scores = Scores(case.latency, case.haste, self.late)
        self.controller = RolloutController(worker, self.scores, seed=SEED)

    def plan(self):
        return self.planner.plan(self.rule)

    def round(self, groups_until_close=None):
        before = sum(g.deferred > 0 for g in self.pool)
        plan, worker = self.plan(), self.controller.worker
        stale = restart_stale(plan, self.version, self.rule)
        planned = copy.deepcopy(plan)
        audit, replaced = accept_some(plan, self.version, self.case.limit, self.case.whole)
        self.engine.sync_weights([], self.version)
        trace, yielded = worker.start_trace(), []

        def replace_useless(group):
            if stable_hash("useless", group.id, self.version) % self.case.useless:
                return None
            for completion in group.completions:
                completion.dropped = completion.dropped or "uninformative"
            another = self.planner.replacement(group, plan, self.rule)
            if another:
                plan.append(another)
                stale.extend(restart_stale([another], self.version, self.rule))
                accept_some([another], self.version, self.case.limit, self.case.whole)
            return another

        feedback = Feedback(None, replace_useless if self.case.useless else None)
        run = self.controller.run(plan, self.rule, self.version, feedback=feedback)
        streamed = set()
        for group in run:
            state = self.controller.state
            streamed |= {g.id for g in self.rule.final_groups(state) if g.complete}
            yielded.append(group.id)
            assert all(g is not group for _, g, _ in self.scores.due)
            if len(yielded) == groups_until_close:
                run.close()
                raise Stopped
        harvest = settle(plan, self.rule, self.controller.state, stale)
        harvest.drafts = audit
        trained = copy.deepcopy(harvest.trained)
        useful = [g.id for g in trained if not all(c.dropped for c in g.completions)]
        assert streamed <= set(useful), "what was certain is not trained on"
        self.pool.settle(plan, harvest.left)
        self.version += 1
        left = copy.deepcopy(list(self.pool))
        return Drawn(
            self.version - 1,
            planned,
            trained,
            left,
            harvest,
            trace,
            yielded,
            before,
            self.rule.is_long(planned),
            replaced,
        )

    def rounds(self, n=12):
        return [self.round() for _ in range(n)]

    @property
    def idle(self):
        return (
            not self.controller.worker.busy
            and self.engine.stats().running == 0
            and self.scores.pending == 0
            and not self.controller._live
        )


def check_passes(run, seen):
    """Of a pass that is over, only what waited when its turn came is still to be drawn."""
    for source in run.planner.source.sources.values():
        uids = {prompt.uid for prompt in source.prompts}
        late = [f"{source.prompts[i].uid}@{n}" for i, n in source.state_dict()["deferred"]]
        for n in range(source.epoch):
            ids = [f"{uid}@{n}" for uid in uids]
            assert sorted(name for name in (*seen, *late) if name in set(ids)) == sorted(ids)


def drawn_when(trace):
    """From which step to which each completion ran, and how far it came."""
    columns = (trace.spans[name] for name in ("request", "start_step", "end_step", "tokens"))
    return sorted(zip(*columns, strict=True))


def ended_at(round, group):
    """The decode step in which each completion of a group that ran was gone."""
    spans = round.trace.spans
    at = dict(zip(spans["request"], spans["end_step"], strict=True))
    return [at.get(f"{group.id}/{c.index}", math.inf) for c in group.completions]


# What is trained on.


@given(any_cases())
def test_every_prompt_is_trained_on_once_a_pass(case):
    run = Run(case)
    trained, seen = [], set()
    for r in run.rounds():
        trained += [g.id for g in r.trained]
        seen |= {g.id for g in r.plan}
        assert len(trained) == len(set(trained))
        waiting = [g.id for g in r.left]
        assert sorted(trained + waiting) == sorted(seen)  # nothing is lost, nothing comes twice
    check_passes(run, seen)


@given(any_cases())
def test_each_update_is_as_large_as_the_synchronous_one(case):
    run = Run(case)
    for r in run.rounds():
        assert len(r.trained) == case.update
        for g in r.trained:
            places = [c.index for c in g.completions]
            assert len(places) == case.size and places == sorted(set(places))
            assert set(places) <= set(range(case.rule.launched(case.size)))
            for c in g.completions:
                assert c.finished and c.scored and not c.dropped
                assert c.segments == [(r.version, len(c.token_ids))]
                assert len(c.logprobs) == len(c.token_ids) > 0
                assert (c.finish_reason == "stop") == (c.token_ids[-1] == 1)
        ids = [g.id for g in r.plan]
        assert [g.id for g in r.trained] == [i for i in ids if i in {g.id for g in r.trained}]
        assert run.idle


@given(cases(reuse_drafts=False))
def test_what_lost_keeps_nothing_of_its_tokens(case):
    for r in Run(case).rounds():
        for g in r.left:
            assert g.deferred == 1 and len(g.completions) == case.size
            for c in g.completions:
                assert c == Completion(c.index, attempts=c.attempts)
        trained = sum(len(c.token_ids) for g in r.trained for c in g.completions)
        assert trained + sum(a.tokens for a in r.harvest.discarded) == r.trace.tokens


@given(cases(reuse_drafts=True))
def test_what_lost_keeps_its_tokens_as_drafts(case):
    run, decoded, trained, discarded, replaced = Run(case), 0, 0, 0, 0
    versions = {}
    for r in run.rounds():
        for g in r.left:
            assert g.deferred == 1 and len(g.completions) == case.size
            for c in g.completions:
                assert c == Completion(c.index, attempts=c.attempts, draft=c.draft)
                assert (c.draft is not None) == (c.attempts == 1)
                if c.draft is not None:  # of the round that put it off
                    assert c.draft.versions == (versions.setdefault(g.id, r.version),)
        decoded += r.trace.tokens
        replaced += r.replaced
        trained += sum(len(c.token_ids) for g in r.trained for c in g.completions)
        discarded += r.harvest.discarded_tokens
        kept = sum(len(c.draft.token_ids) for g in r.left for c in g.completions if c.draft)
        assert decoded + replaced == trained + discarded + kept
        if not r.long:
            assert not r.harvest.drafts.tokens


@given(cases(reuse_drafts=True, completion_ratio=1.0))
def test_with_drafts_only_what_is_rejected_is_decoded_for_nothing(case):
    for r in Run(case).rounds():
        assert not r.harvest.discarded
        assert r.harvest.discarded_tokens == r.harvest.drafts.rejected_tokens
        again = {c.index for g in r.trained for c in g.completions if c.attempts}
        assert r.long or not again


@given(any_cases(), st.integers(2, 4))
def test_with_completions_that_are_bad(case, bad):
    run = Run(replace(case, bad=bad))
    trained, seen = [], set()
    for r in run.rounds():
        trained += [g.id for g in r.trained]
        seen |= {g.id for g in r.plan}
        assert len(trained) == len(set(trained))
        assert sorted(trained + [g.id for g in r.left]) == sorted(seen)
        losers = len(r.plan) - len(r.trained)
        assert len(r.useful) == case.update or (len(r.useful) < case.update and not losers)
        assert run.idle
        assert len(r.left) < case.raced or r.left == []


# Short rounds and long ones.


@given(cases())
def test_a_round_is_long_once_enough_have_lost(case):
    run, queue = Run(case), []
    for r in run.rounds():
        assert r.before == len(queue) and r.long == (len(queue) >= case.update)
        if r.long:
            assert [g.id for g in r.plan] == queue[: case.update]
            assert [g.id for g in r.trained] == queue[: case.update]
            assert [len(g.completions) for g in r.plan] == [case.size] * case.update
            queue = queue[case.update :]
        else:
            assert len(r.plan) == case.raced and not any(g.deferred for g in r.plan)
            assert not {g.id for g in r.plan} & set(queue)
            won = {g.id for g in r.trained}
            queue += [g.id for g in r.plan if g.id not in won]
        assert [g.id for g in r.left] == queue and len(queue) < case.raced


@pytest.mark.slow
@given(cases())
def test_nobody_starves(case):
    extra = case.raced - case.update
    # short rounds until enough have lost, and the long ones of all that may be before it
    cycle = 1 + math.ceil(case.update / extra) if extra else 1
    most = cycle * (1 + case.raced // case.update)
    first = {}
    for r in Run(case).rounds(20):
        for g in r.plan:
            first.setdefault(g.id, r.version)
        assert all(r.version - first[g.id] <= most for g in (*r.trained, *r.left))
        assert all(g.deferred <= 1 for g in (*r.trained, *r.left))
        assert all(c.attempts <= 1 for g in r.trained for c in g.completions)


def test_with_the_default_every_fifth_round_is_long():
    for update in (4, 8):
        rounds = Run(Case(update, 2)).rounds(15)
        assert [r.long for r in rounds] == ([False] * 4 + [True]) * 3
        assert [len(r.left) for r in rounds[4::5]] == [0, 0, 0]


# Without a queue for long rounds.


def due_of(plan, case):
    """What a round waits for: all that lost, if one has lost so often."""
    lost = [g for g in plan if g.deferred]
    most = max((g.deferred for g in lost), default=0)
    return {g.id for g in lost} if most >= case.max_deferrals else set()


@given(any_cases(prompt_ratio=1.6, update=4).filter(lambda case: case.max_deferrals))
def test_what_lost_goes_on_beside_fresh_prompts(case):
    waiting = []
    for r in Run(case).rounds():
        ids = [g.id for g in r.plan]
        assert ids[: len(waiting)] == waiting  # the oldest first
        assert len(ids) == 7 and not any(g.deferred for g in r.plan[len(waiting) :])
        waiting = [g.id for g in r.left]
        assert len(waiting) == 3 and set(waiting) < set(ids)
        due = due_of(r.plan, case)
        assert r.long == bool(due) and due <= {g.id for g in r.trained}
        assert all(1 <= g.deferred <= case.max_deferrals for g in r.left)


@given(
    any_cases(completion_ratio=1.0, reuse_drafts=True, patience=PATIENCE, slots=1000).filter(
        lambda case: case.max_deferrals
    )
)
def test_a_race_is_over_once_it_has_enough_and_all_that_may_not_lose(case):
    for r in Run(case).rounds():
        due = due_of(r.plan, case)
        spans, steps = r.trace.spans, r.trace.decode_steps
        at = dict(zip(spans["request"], spans["end_step"], strict=True))
        # what a draft was all of did not run
        ends = {g.id: max(at.get(f"{g.id}/{c.index}", 0) for c in g.completions) for g in r.plan}
        if len(due) > case.update:  # more than two updates race
            continue
        assert due <= {g.id for g in r.trained}
        others = sorted(n for name, n in ends.items() if name not in due)
        needed = others[case.update - len(due) - 1] if len(due) < case.update else 0
        assert steps == max([needed, *(ends[name] for name in due)])


def test_a_prompt_goes_on_from_what_it_had():
    """In every round until it wins: nothing waits without progress."""
    case = Tailed(8, 4, prompt_ratio=1.5, limit=2000, reuse_drafts=True, max_deferrals=3, spare=40)
    drafted = {}
    for r in Run(case).rounds(20):
        for g in (g for g in r.plan if g.deferred):
            assert [c.draft and len(c.draft.token_ids) for c in g.completions] == drafted[g.id]
        drafted = {
            g.id: [c.draft and len(c.draft.token_ids) for c in g.completions] for g in r.left
        }
        assert all(map(all, drafted.values()))
        assert r.harvest.drafts.tokens == sum(
            len(c.draft.token_ids) for g in r.plan for c in g.completions if c.draft
        )


@races
def test_a_round_whose_drafts_are_enough_decodes_nothing(completion_ratio):
    """All are as long as they may be, so that they are done together and half of them lose."""

    class Equal(Case):
        def length(self, request):
            return 30

    case = Equal(
        4,
        2,
        2.0,
        completion_ratio=completion_ratio,
        reuse_drafts=True,
        max_deferrals=8,
        spare=20,
        whole=10,
    )
    rounds = Run(case).rounds(6)
    assert [r.trace.decode_steps for r in rounds] == [20, 0] * 3
    assert [[g.deferred for g in r.trained] for r in rounds] == [[0] * 4] + [[1] * 4] * 5


# When a round ends.


@given(cases(completion_ratio=1.0, patience=PATIENCE, reuse_drafts=False))
def test_a_round_ends_with_the_step_that_has_enough(case):
    for r in Run(case).rounds(8):
        won = [max(ended_at(r, g)) for g in r.trained]
        assert max(won) == r.trace.decode_steps
        ids = {g.id for g in r.trained}
        for g in r.plan:
            if g.id not in ids:  # it was not done before
                assert max(ended_at(r, g)) >= r.trace.decode_steps


@given(
    st.floats(1, 3).flatmap(
        lambda ratio: cases(completion_ratio=ratio, patience=PATIENCE, slots=1000, key="id")
    )
)
def test_the_first_completions_of_a_prompt_are_kept(case):
    r = Run(case).round()
    launched = range(case.rule.launched(case.size))
    for g in r.trained:
        drawn = {
            i: min(case.limit, case.length(SimpleNamespace(id=f"{g.id}/{i}"))) for i in launched
        }
        last = sorted(drawn.values())[case.size - 1]
        assert max(drawn[c.index] for c in g.completions) == last
        assert [len(c.token_ids) for c in g.completions] == [drawn[c.index] for c in g.completions]
        # of those that tie, and of all that were done before it, none is passed over
        assert {i for i, n in drawn.items() if n < last} <= {c.index for c in g.completions}


# Scores.


@given(any_cases(patience=PATIENCE), st.integers(0, 30), st.integers(1, 3))
def test_what_wins_does_not_depend_on_how_long_scores_take(case, latency, haste):
    run, twin = Run(case), Run(replace(case, latency=latency, haste=haste))
    for r, other in zip(run.rounds(), twin.rounds(), strict=True):
        assert r.plan == other.plan and r.trained == other.trained and r.left == other.left
        assert drawn_when(r.trace) == drawn_when(other.trace)
        assert sorted(r.harvest.discarded) == sorted(other.harvest.discarded)


@pytest.mark.slow
@pytest.mark.parametrize("max_deferrals", [None, 2, 8])
def test_nor_where_drafts_that_teach_nothing_are_replaced(max_deferrals):
    """Scores of what was kept whole come at once, or some steps later."""

    class Few(Case):
        """Lengths: many are done in the step in which the race is over, and lose."""

        def length(self, request):
            return 4 + 4 * (stable_hash(self.salt, request.id) % 3)

    for salt in range(20):
        case = Few(3, 2, 2.0, reuse_drafts=True, max_deferrals=max_deferrals, salt=salt, spare=20)
        case = replace(case, whole=8, useless=2, latency=0)
        run, twin = Run(case), Run(replace(case, latency=9))
        for r, other in zip(run.rounds(8), twin.rounds(8), strict=True):
            assert r.plan == other.plan and r.trained == other.trained and r.left == other.left
            assert drawn_when(r.trace) == drawn_when(other.trace)


@races
def test_a_race_waits_for_the_scores_of_those_that_are_ahead(completion_ratio):
    """They come a million turns later, and still win."""
    case = Case(3, 2, 2.0, completion_ratio=completion_ratio, latency=0)
    prompts = [g.prompt.uid for g in Run(case).round().trained]
    for late in ((prompts[0],), tuple(prompts)):
        patient = Run(case, late=late).round()
        assert [g.prompt.uid for g in patient.trained] == prompts
        assert all(g.deferred == 0 for g in patient.trained)


@races
def test_without_patience_slow_scores_are_overtaken(completion_ratio):
    case = Case(3, 2, 2.0, completion_ratio=completion_ratio, latency=0, patience=0.0)
    first = [g.prompt.uid for g in Run(case).round().trained]
    run = Run(case, late=(first[0],))
    hasty = run.round()
    assert first[0] not in [g.prompt.uid for g in hasty.trained]
    assert len(hasty.trained) == 3 and run.idle
    assert first[0] in [g.prompt.uid for g in hasty.left]
    again = run.round()
    assert again.long  # which waits for all of them
    assert first[0] in [g.prompt.uid for g in again.trained]


def test_where_fewer_than_an_update_are_left_slow_scores_are_waited_for():
    case = Case(3, 2, 1.25, latency=0, patience=0.0)
    late = tuple(g.prompt.uid for g in Run(case).plan()[:2])
    r = Run(case, late=late).round()
    assert len(r.trained) == 3  # one of the two was needed


# The synchronous run.


@given(any_cases(prompt_ratio=1.0, completion_ratio=1.0))
def test_without_a_race_rounds_are_the_plain_ones(case):
    run, plain = Run(case), Run(case, rule=FullRound(case.update))
    for _ in range(6):
        r, other = run.round(), plain.round()
        assert r.trained == other.trained and not r.left and not r.long
        assert r.trace.spans == other.trace.spans
        assert sorted(r.yielded) == sorted(other.yielded)
        assert r.harvest == other.harvest


@given(cases(prompt_ratio=1.0, completion_ratio=1.0))
def test_completions_without_rivals_do_not_race(case):
    run, plain = Run(case), Run(case, rule=FullRound(case.update))
    for _ in range(6):
        r, other = run.round(), plain.round()
        assert r.trained == other.trained and r.trace.spans == other.trace.spans
        assert not r.harvest.discarded


# Stopping and going on.


@given(
    any_cases(patience=PATIENCE),
    st.booleans(),
    st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=6),
)
def test_a_round_cut_short_is_drawn_again_as_a_whole(case, stream, stops):
    run, twin = Run(case), Run(replace(case, stream=stream))
    for i in range(6):
        if i < len(stops):
            run.plan()  # draws what is to be drawn
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
        assert again.plan == plain.plan and again.trained == plain.trained
        assert again.left == plain.left and list(run.pool) == list(twin.pool)
        assert drawn_when(again.trace) == drawn_when(plain.trace)


@given(any_cases(patience=PATIENCE), st.integers(1, 4))
def test_how_an_engine_tells_does_not_matter(case, max_jump):
    run, twin = Run(case), Run(replace(case, stream=True))
    twin.engine.max_jump = max_jump
    for r, other in zip(run.rounds(8), twin.rounds(8), strict=True):
        assert (r.trained, r.left) == (other.trained, other.left)
        assert sorted(r.harvest.discarded) == sorted(other.harvest.discarded)
        assert r.trace.decode_steps == other.trace.decode_steps


@given(any_cases(patience=PATIENCE))
def test_a_run_goes_on_after_a_checkpoint(case):
    run, rounds = Run(case), Run(case).rounds(10)
    for expected in rounds:
        r = run.round()
        assert (r.plan, r.trained, r.left) == (expected.plan, expected.trained, expected.left)
        file = io.BytesIO()
        torch.save(run.planner.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        resumed = Run(case, version=run.version)
        resumed.planner.load_state_dict(state, resumed.prompts.__getitem__)
        assert list(resumed.pool) == list(run.pool)
        assert [g.deferred for g in resumed.pool] == [g.deferred for g in expected.left]
        run = resumed


# What it is for.


class Tailed(Case):
    """A few completions are many times as long as most."""

    def length(self, request):
        return LogNormalLengths(50, 1.2, self.salt, "seed")(request)


@pytest.mark.slow
@races
def test_rounds_are_shorter_where_a_few_completions_are_long(completion_ratio):
    """Long rounds included, where everything has a slot."""
    case = Tailed(8, 4, completion_ratio=completion_ratio, limit=2000, latency=0, spare=40)
    steps = {}
    for name, rule in (("tail", case.rule), ("full", FullRound(8))):
        rounds = Run(case, rule=rule).rounds(100)
        steps[name] = fmean(r.trace.decode_steps for r in rounds)
        assert all(len(r.trained) == 8 for r in rounds)
    assert steps["tail"] < 0.75 * steps["full"], steps


@pytest.mark.slow
def test_rounds_are_shorter_still_where_losers_go_on():
    """Even where only half of each draft is kept."""
    case = Tailed(8, 4, limit=2000, latency=0, spare=40, reuse_drafts=True)
    steps = []
    for most in (None, 8):
        rounds = Run(replace(case, max_deferrals=most)).rounds(100)
        steps.append(fmean(r.trace.decode_steps for r in rounds))
    assert steps[1] < 0.95 * steps[0], steps


# Quotas of domains.


@st.composite
def shares(draw, update):
    """Of some domains, each with a prompt or more in an update."""
    whole = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(sum))
    while sum(whole) > update:
        whole = [max(1, n - 1) for n in whole[: max(1, len(whole) - 1)]]
    whole[0] += update - sum(whole)
    return {"abc"[i]: n / update for i, n in enumerate(whole)}


@given(cases(), st.data())
def test_each_domain_has_its_quota_of_every_short_round(case, data):
    per_domain = data.draw(shares(case.update))
    rule = case.with_shares(per_domain)
    quota = {d: round(share * case.update) for d, share in per_domain.items()}
    assert rule.quotas == quota
    run = Run(case, rule)
    trained, seen = [], set()
    for r in run.rounds():
        assert len(r.trained) == case.update and r.long == (r.before >= case.update)
        planned = [g.prompt.columns["domain"] for g in r.plan]
        if not r.long:
            won = [g.prompt.columns["domain"] for g in r.trained]
            assert {d: won.count(d) for d in quota} == quota
            raced = {d: math.ceil(round(case.prompt_ratio * n, 6)) for d, n in quota.items()}
            assert {d: planned.count(d) for d in quota} == raced
        trained += [g.id for g in r.trained]
        seen |= {g.id for g in r.plan}
        assert len(trained) == len(set(trained))
        assert sorted(trained + [g.id for g in r.left]) == sorted(seen)
        assert len(r.left) <= rule.most_deferred + rule.most_prompts() - case.update
    check_passes(run, seen)


@given(any_cases(prompt_ratio=1.7).filter(lambda case: case.max_deferrals), st.data())
def test_each_domain_has_its_quota_where_losers_go_on(case, data):
    rule = case.with_shares(data.draw(shares(case.update)))
    raced = {d: math.ceil(round(1.7 * n, 6)) for d, n in rule.quotas.items()}
    for r in Run(case, rule).rounds():
        for groups, expected in ((r.trained, rule.quotas), (r.plan, raced)):
            domains = [g.prompt.columns["domain"] for g in groups]
            assert {d: domains.count(d) for d in rule.quotas} == expected
        assert all(g.deferred <= case.max_deferrals for g in r.left)


@given(any_cases(spare=12), st.data(), st.integers(2, 4))
def test_what_is_certain_stays_so_where_prompts_of_domains_are_replaced(case, data, useless):
    case = replace(case, useless=useless, whole=8)
    run = Run(case, case.with_shares(data.draw(shares(case.update))))
    trained = [g.id for r in run.rounds(8) for g in r.trained]  # asserts what is certain
    assert len(trained) == len(set(trained)) and run.idle


@given(any_cases(), st.data())
def test_one_domain_is_none(case, data):
    run, twin = Run(case), Run(case, case.with_shares({"x": 1.0}))
    for r, t in zip(run.rounds(6), twin.rounds(6), strict=True):
        assert (r.plan, r.trained, r.left) == (t.plan, t.trained, t.left)


def test_a_domain_of_long_completions_keeps_its_share():
    class Long(Case):
        def length(self, request):
            drawn = stable_hash("length", request.id) % 5
            return 15 + drawn if request.id.startswith("b") else 1 + drawn

    case = Long(4, 2, 1.5)
    together = Run(case, TailRound(4, 2, 1.5, shares={"a": 0.5, "b": 0.5}))
    for r in together.rounds(6):
        assert r.long or [g.prompt.uid[0] for g in r.trained].count("b") == 2


def test_a_long_round_has_no_quotas_even_if_nothing_can_be_trained_on_of_what_waited():
    rule = TailRound(2, 1, 2.0, shares={"a": 0.5, "b": 0.5})

    def done(name, dropped=None, deferred=0):
        completion = Completion(0, [5], [-1.0], [(0, 1)], "stop", scores=[1.0], dropped=dropped)
        prompt = Prompt(name, name, (1,), {"domain": name[0]})
        return Group(f"{name}@0", prompt, Sampling(8), [completion], deferred)

    late = [done("b1", "uninformative", 1), done("b2", "uninformative", 1)]
    instead = [done("a1"), done("a2")]
    state = RoundState([*late, *instead], 4, [*late, *instead], 4, patient=True, final=4)
    assert rule.done(state) and [g.id for g in rule.final_groups(state)] == ["a1@0", "a2@0"]
    assert not rule.settle([*late, *instead], state)[1]


def test_a_prompt_that_nothing_can_be_trained_on_uses_up_no_quota():
    rule = TailRound(2, 1, 2.0, shares={"a": 0.5, "b": 0.5})

    def done(name, dropped=None):
        completion = Completion(0, [5], [-1.0], [(0, 1)], "stop", scores=[1.0], dropped=dropped)
        prompt = Prompt(name, name, (1,), {"domain": name[0]})
        return Group(f"{name}@0", prompt, Sampling(8), [completion])

    decoded = [done("a1", "uninformative"), done("b1"), done("b2")]
    state = RoundState(decoded, 4, decoded, 3, patient=True, final=3)
    assert not rule.done(state) and [g.id for g in rule.final_groups(state)] == ["b1@0"]
    state.decoded.append(done("a2"))
    assert rule.done(state)
    trained, left = rule.settle(decoded, state)
    assert [g.id for g in trained] == ["a1@0", "b1@0", "a2@0"]
    assert [(g.id, g.deferred) for g in left] == [("b2@0", 1)]


@pytest.mark.parametrize(
    ("shares", "prompts", "expected"),
    [
        ({"a": 0.5, "b": 0.5}, 5, {"a": 3, "b": 2}),
        ({"a": 0.7, "b": 0.2, "c": 0.1}, 8, {"a": 6, "b": 1, "c": 1}),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 32, {"a": 11, "b": 11, "c": 10}),
        ({"a": 0.9, "b": 0.1}, 10, {"a": 9, "b": 1}),
    ],
)
def test_quotas_by_largest_remainder(shares, prompts, expected):
    assert quotas(shares, prompts) == expected


def test_a_domain_without_a_prompt_is_refused():
    with pytest.raises(UsageError, match=r"leaves no prompt of 'b' in a round of 4"):
        quotas({"a": 0.95, "b": 0.05}, 4)
