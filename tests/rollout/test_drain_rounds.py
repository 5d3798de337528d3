"""Whole runs whose free slots begin later rounds: what is begun, and that all of it is verified."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.data.source import DomainSource
from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.rollout.audit import DraftAudit
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.round_runner import RoundRunner
from lit_rlsched.rollout.simulate.rounds import simulated_session
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.types import Prompt, Sampling, stable_hash

LIMIT, SIZE = 24, 2
RULES = {
    "whole": lambda: FullRound(3),
    "sorted": lambda: SortedRound(2, 6, SIZE),
    "sorted completions": lambda: SortedRound(2, 6, SIZE, "completion"),
    "sorted verified": lambda: SortedRound(2, 6, SIZE, mode="verified", oversubscribe=1.5),
    "sorted partial": lambda: SortedRound(2, 6, SIZE, "completion", "partial", oversubscribe=2.0),
    "tail": lambda: TailRound(3, SIZE, 1.4),
    "tail drafts": lambda: TailRound(3, SIZE, 1.4, 1.5, reuse_drafts=True),
    "tail deferring": lambda: DeferringTailRound(3, SIZE, 1.4, max_deferrals=2),
}


class Run:
    """Draws rounds and notes which drafts there were, and what verified them."""

    def __init__(self, rule, prompts, slots, salt, drains=True, order="fifo"):
        self.rule, self.drains = rule, drains
        engine = SimulatedEngine(lambda request: 1 + stable_hash(salt, request.id) % LIMIT)
        self.session = simulated_session(
            engine, slots, LIMIT + 1, lambda: Admission(slots, order=order)
        )
        planner = RoundPlanner(RolloutBuffer(), Sampling(LIMIT), SIZE)
        data = [Prompt(f"{i}", "?", (1,)) for i in range(prompts)]
        planner.connect(DomainSource(data, salt, True, None))
        self.runner, self.pool = RoundRunner(planner), planner.pool
        self.begun, self.verified, self.rounds = set(), Counter(), []

    def verify(self, groups, version):
        audit = DraftAudit()
        for group in groups:
            for completion in group.completions:
                if (draft := completion.draft) is None:
                    continue
                self.verified[group.id, completion.index, draft.versions] += 1
                kept = (len(draft.token_ids) + 1) // 2
                completion.draft, completion.segments = None, [(version, kept)]
                completion.token_ids.extend(draft.token_ids[:kept])
                completion.logprobs.extend(draft.logprobs[:kept])
                audit.tokens += len(draft.token_ids)
                audit.accepted_tokens += kept
        return audit

    def round(self):
        number = len(self.rounds)
        hooks = RoundHooks()
        hooks.verify, hooks.drafts_next = self.verify, "cut" if self.drains else None
        drawn = self.runner.run(self.session, self.rule, number, number, hooks)
        self.runner.commit(drawn)
        if drawn.following is not None:
            for sample in drawn.following.samples:
                if (draft := sample.completion.draft) is not None:
                    assert draft.versions == (number,)
                    assert sample.group.deferred or not sample.completion.attempts
                    self.begun.add((sample.group.id, sample.completion.index, (number,)))
        self.rounds.append(drawn)
        return drawn

    @property
    def waiting(self):
        """Drafts of the pool."""
        samples = ((g, c) for g in self.pool for c in g.completions if c.draft)
        return {(g.id, c.index, c.draft.versions) for g, c in samples}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(
    st.integers(9, 20),
    st.integers(1, 12),
    st.integers(0, 99),
    st.sampled_from(["fifo", "least_attained"]),
)
def test_every_draft_is_verified_once(rule, prompts, slots, salt, order):
    run = Run(rule(), prompts, slots, salt, order=order)
    for _ in range(12):
        drawn = run.round()
        uids = [group.prompt.uid for group in run.pool]
        assert len(uids) == len(set(uids)), "two completions would share their noise"
        assert run.begun <= run.waiting | run.verified.keys()
        for group in drawn.harvest.trained:
            assert all(c.draft is None for c in group.completions)
    assert set(run.verified.values()) <= {1}
    if not run.rule.keeps_drafts:
        assert run.verified.keys() | run.waiting == run.begun
    trained = Counter(g.prompt.uid for d in run.rounds for g in d.harvest.trained)
    assert trained


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_drafts_are_begun(rule):
    run = Run(rule(), 20, 7, 1)
    for _ in range(12):
        run.round()
    assert run.verified and any(d.metrics["rollout/draft_tokens"] for d in run.rounds)
    assert sum(d.metrics["rollout/drafts_begun"] for d in run.rounds) == len(run.begun)


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("sorted")])
def test_pools_do_not_mix(name, monkeypatch):
    """No prompt of a pool is decoded beside those of the one before it."""
    order, add = {}, RolloutBuffer.add
    monkeypatch.setattr(
        RolloutBuffer, "add", lambda self, g: (order.setdefault(g.id, len(order)), add(self, g))
    )
    run, pools = Run(RULES[name](), 40, 9, 3), []
    for _ in range(14):
        pools += {order[group.id] // 6 for group in run.round().planned}
    assert pools == sorted(pools) and pools[-1] > 2, "a round has prompts of one pool"


def test_losers_of_the_next_round_begin_if_it_is_long():
    run = Run(RULES["tail"](), 20, 10, 1)
    late = []
    for _ in range(12):
        following = run.round().following
        late += [s for s in following.samples if s.group.deferred and s.completion.draft]
        assert not any(s.group.deferred for s in following.samples[-1:])
    assert late


def test_data_that_has_no_other_prompts():
    """The next race draws what the pool leaves, and nothing is begun of what is there already."""
    run = Run(TailRound(3, SIZE, 1.4), 7, 20, 1)
    for _ in range(8):
        run.round()
    assert len({group.prompt.uid for group in run.pool}) == len(run.pool) <= 7


def test_a_round_without_drafts_is_the_same():
    """Up to the first verification, whatever the rule."""
    for rule in RULES.values():
        first, second = (Run(rule(), 20, 7, 1, drains) for drains in (True, False))
        one, two = first.round(), second.round()
        assert [g.id for g in one.harvest.trained] == [g.id for g in two.harvest.trained]
        assert one.trace.decode_steps == two.trace.decode_steps
        assert one.trace.busy_slot_steps >= two.trace.busy_slot_steps
