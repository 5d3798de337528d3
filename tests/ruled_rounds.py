"""Rounds of any rule without a model: the loop of `fit`, simulated engines and made-up scores."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bare_rollout import hooks_of

from lit_rlsched.data.source import DomainSource
from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.admission import Admission, CacheBudget
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.tail_batching import useless
from lit_rlsched.training.selection import Selection, Stop
from lit_rlsched.types import Completion, Group, Prompt, Sampling, stable_hash

SEED = 1
ADMISSIONS = {
    "fifo": lambda slots: Admission(slots),
    "micro groups": lambda slots: Admission(slots, refill="rounds"),
    "budget": lambda slots: Admission(slots, budget=CacheBudget(tokens=60, quantum=4)),
}


@dataclass(frozen=True)
class Case:
    """A rule, and all that it meets in a round."""

    make: Callable[[], Any]
    """Makes the rule."""
    size: int = 2
    domains: str = ""
    """A letter for each domain of the data."""
    slots: int = 1000
    """Of each engine."""
    engines: int = 1
    admission: str = "fifo"
    stream: bool = False
    max_jump: int | None = None
    key: str = "id"
    """What lengths depend on."""
    seed_domain: int = 0
    limit: int = 20
    lengths: Callable[[Any], int] | None = None
    """Instead of lengths that follow from the seed_domain."""
    spare: int = 3
    """Prompts of the data, of each domain, beyond those that may wait at once."""
    shuffle: bool = True
    latency: int = 3
    """Most turns of the loop until a score comes."""
    haste: int = 0
    """Another one, other latencies."""
    late: tuple[str, ...] = ()
    """Prompts whose scores come a million turns later."""
    whole: int = 0
    """So many of ten drafts are kept whole."""
    useless: int = 0
    """One in so many prompts teaches nothing and is replaced."""
    bad: int = 0
    """One in so many completions has a log-prob that is not finite."""
    stops: bool = False
    """Scores are 0 or 1, and a group stops once it has both."""

    @property
    def rule(self):
        return self.make()

    def length(self, request):
        """One in five ends at once; some would be longer than they may."""
        if self.lengths is not None:
            return self.lengths(request)
        drawn = stable_hash(self.seed_domain, getattr(request, self.key))
        return 1 if drawn % 5 == 0 else 1 + drawn // 5 % (self.limit + 4)


class Stopped(Exception):
    pass


class Engine(SimulatedEngine):
    """Stops when it is stepped once too often; some log-probs are not finite."""

    steps_left = math.inf
    bad = 0

    def jump(self, steps):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Stopped
        events = super().jump(steps)
        for event in events:
            name = stable_hash(event.request_id, self.version)
            if self.bad and event.finish_reason and name % self.bad == 0:
                event.logprobs[-1] = math.inf  # not NaN, which equals nothing
        return events


class Scores(Unscored):
    """Come some turns later, whoever waits for them."""

    def __init__(self, case):
        super().__init__()
        self.case, self.due, self._now = case, [], 0

    @property
    def pending(self):
        return len(self.due)

    def submit(self, group, completion):
        name = group.id, completion.index, list(completion.token_ids)
        turns = stable_hash(self.case.haste, *name) % (self.case.latency + 1)
        turns += 10**6 * (group.prompt.uid in self.case.late)
        if completion.dropped:  # nobody is asked
            turns = 0
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
            value = stable_hash("score", completion.token_ids) % (2 if self.case.stops else 97)
            completion.scores = [None if value % 7 == 6 else float(value)]
            yield group, completion

    def cancel(self, group=None):
        self.due = [(n, g, c) for n, g, c in self.due if group and g is not group]


@dataclass
class Drawn:
    """A round, and the pool that it left."""

    version: int
    plan: list[Group]
    """The planned groups before their drafts were verified, replacements not included."""
    planned: list[str]
    """Ids of all groups, replacements included."""
    trained: list[Group]
    left: list[Group]
    round_result: Any
    trace: Any
    metrics: dict[str, float]
    ended: list[str]
    """Groups for which the hook was called."""
    replaced: int
    """Tokens that were drawn in place of rejected ones."""

    @property
    def completions(self):
        return [c for g in self.trained for c in g.completions]

    @property
    def lengths(self):
        return [len(c.token_ids) for c in self.completions]

    @property
    def useful(self):
        return [g for g in self.trained if not all(c.dropped for c in g.completions)]

    @property
    def result(self):
        """What must not depend on how the round went."""
        return self.plan, self.planned, self.trained, self.left, sorted(self.round_result.discarded)

    @property
    def steps(self):
        """From which step to which each completion ran, and how far it came."""
        names = ("request", "start_step", "end_step", "tokens")
        return sorted(zip(*(self.trace.spans[name] for name in names), strict=True))

    def ended_at(self, group, default=math.inf):
        """The decode step in which each completion of a group that ran was gone."""
        at = dict(zip(self.trace.spans["request"], self.trace.spans["end_step"], strict=True))
        return [at.get(f"{group.id}/{c.index}", default) for c in group.completions]


class Run:
    """The rounds of `fit`, a policy version each.

    Args:
        case: All that a round meets.
        rule: Instead of the rule of the case.
    """

    def __init__(self, case, rule=None):
        self.case, self.version = case, 0
        self.rule = rule or case.rule
        own = case.rule
        n = max(own.most_prompts() + own.most_deferred, getattr(own, "pool_prompts", 0))
        prompts = [
            Prompt(f"{d}{i:03}", f"prompt {d}{i}", (4 + i % 10, 5), {"domain": d})
            for i in range(n + case.spare)
            for d in case.domains or "x"
        ]
        self.prompts = {prompt.uid: prompt for prompt in prompts}
        self.rule.check_enough(len(prompts))
        self.rule.check_domains(prompts)
        self.pool = Pool(Sampling(case.limit), case.size)
        domain_of = self.rule.domain_of if self.rule.has_domains else None
        self.pool.connect(DomainSource(prompts, SEED, case.shuffle, domain_of))
        self.engines = [
            Engine(case.length, stream=case.stream, max_jump=case.max_jump)
            for _ in range(case.engines)
        ]
        for engine in self.engines:
            engine.bad = case.bad
        self.scores = Scores(case)
        self.ended: list[str] = []
        self.verified: Counter[tuple] = Counter()
        """Completions and the versions of their drafts, by how often they were verified."""
        self.kept: dict[tuple, int] = {}
        """Tokens of a completion that its verification under a version left."""
        self.session = RolloutSession(
            EnginePool(self.engines) if case.engines > 1 else self.engines[0],
            EngineSpec("", case.slots * case.engines, 8 + case.limit, (1,), device=None),
            self.scores,
            lambda version: self.session.engine.sync_weights([], version) or {},
            lambda: ADMISSIONS[case.admission](case.slots),
            seed=SEED,
        )

    def stop_after(self, steps):
        """Let each engine fail after so many more steps."""
        for engine in self.engines:
            engine.steps_left = steps

    def verify(self, groups, version):
        """Stands in for the verification: some of each draft, and a token in place of the next."""
        audit = DraftAudit()
        for group in groups:
            for completion in (c for c in group.completions if c.draft):
                draft, completion.draft = completion.draft, None
                assert draft.versions[-1] < version and not completion.token_ids
                self.verified[group.id, completion.index, draft.versions] += 1
                n = stable_hash("accept", group.id, completion.index) % (len(draft.token_ids) + 1)
                if stable_hash("whole", group.id, completion.index, version) % 10 < self.case.whole:
                    n = len(draft.token_ids)
                audit += DraftAudit(len(draft.token_ids), n, n == len(draft.token_ids))
                completion.token_ids, completion.logprobs = draft.token_ids[:n], draft.logprobs[:n]
                if n < len(draft.token_ids):
                    completion.token_ids.append(9)
                    completion.logprobs.append(-0.5)
                    self.replaced += 1
                    audit.drawn += 1
                n = len(completion.token_ids)
                self.kept[group.id, completion.index, version] = n
                completion.segments = [(version, n)]
                ends, most = completion.token_ids[-1] == 1, n == self.case.limit
                completion.finish_reason = "stop" if ends else "length" if most else None
        return audit

    def is_useless(self, group):
        if stable_hash("useless", group.id, self.version) % self.case.useless:
            return False
        for completion in group.completions:
            completion.dropped = completion.dropped or "uninformative"
        return True

    def round(self, stop_at_group=None):
        """Draw a round and commit it; with `stop_at_group`, fail at that group."""
        case, self.ended, self.replaced = self.case, [], 0
        plan, certain, seen = [], set(), 0

        def advanced(state, trace):
            nonlocal seen
            seen += 1
            final = self.rule.final_groups(state)
            certain.update(g.id for g in final if g.complete and not useless(g))
            if seen == stop_at_group:
                raise Stopped

        def another(group, state):
            if not self.is_useless(group) or len(state.due) >= 3 * self.rule.update_prompts:
                return None
            return self.pool.replacement(group, state.planned, self.rule)

        stop = Stop(Selection(2, reward_range=(0.0, 1.0)), [1.0])
        hooks = hooks_of(
            planned=lambda state: plan.extend(group.copy() for group in state.planned),
            group_ended=lambda group: self.ended.append(group.id),
            stop=stop if case.stops else None,
            replaces=bool(case.useless),
            **{"verify": self.verify, "another": another, "advanced": advanced},
        )
        groups, version = self.pool.plan(self.rule), self.version
        rollout = Rollout(self.session, groups, version, self.rule, hooks, self.pool.seed_domain)
        rollout.load_weights()
        rollout.run()
        result = rollout.result()
        assert self.idle
        metrics = result.metrics | self.pool.commit(result, self.rule)
        self.version += 1
        one = Drawn(
            version,
            plan,
            [g.id for g in result.planned],
            result.trained,
            result.left,
            result,
            result.trace,
            metrics,
            self.ended,
            self.replaced,
        )
        assert certain <= {g.id for g in one.useful}, "what was certain is not trained on"
        return one

    def each(self, n=6):
        """Draw the next round each time that one is asked for."""
        return (self.round() for _ in range(n))

    def rounds(self, n=12):
        return [*self.each(n)]

    def whole_pool(self):
        rounds = [self.round()]
        while len(self.pool):
            rounds.append(self.round())
            assert len(rounds) < 100, "starved"
        return rounds

    def resumed(self, state):
        """A run of another process that goes on from this state."""
        other = Run(self.case)
        other.version, other.kept = self.version, self.kept
        other.pool.load_state_dict(state, other.prompts.__getitem__)
        return other

    @property
    def idle(self):
        return (
            not self.session.worker.busy
            and not any(engine.stats().running for engine in self.engines)
            and not self.scores.pending
            and not self.session._rollout._requests.live
        )


def plain(case):
    """The same data and engines with synchronous rounds."""
    return Run(case, FullRound(case.rule.update_prompts))


def blank(completion):
    """What is left of a completion whose tokens were thrown away."""
    return Completion(completion.index, attempts=completion.attempts)


def changed(case, **fields):
    return replace(case, **fields)
