"""Which prompts the free slots of a round begin; the rest is in `test_rule_contract.py`."""

from functools import partial

import pytest
from ruled_rounds import Case, Run

from lit_rlsched.rollout.planner import RolloutBuffer
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound

SIZE = 2
RULES = {
    "whole": partial(FullRound, 3),
    "sorted": partial(SortedRound, 2, 6, SIZE),
    "sorted completions": partial(SortedRound, 2, 6, SIZE, "completion"),
    "sorted verified": partial(SortedRound, 2, 6, SIZE, mode="verified", oversubscribe=1.5),
    "sorted partial": partial(SortedRound, 2, 6, SIZE, "completion", "partial", oversubscribe=2.0),
    "tail": partial(TailRound, 3, SIZE, 1.4),
    "tail drafts": partial(TailRound, 3, SIZE, 1.4, 1.5, reuse_drafts=True),
    "tail deferring": partial(DeferringTailRound, 3, SIZE, 1.4, max_deferrals=2),
}


def run_of(name, **case):
    return Run(Case(RULES[name], SIZE, drains=True, **{"spare": 20, "salt": 1, **case}))


@pytest.mark.parametrize("name", RULES)
def test_drafts_are_begun(name):
    run = run_of(name, slots=7)
    rounds = run.rounds(12)
    assert run.verified and any(r.metrics["rollout/draft_tokens"] for r in rounds)
    assert sum(r.metrics["rollout/drafts_begun"] for r in rounds) == len(run.begun)


@pytest.mark.parametrize("name", [name for name in RULES if name.startswith("sorted")])
def test_pools_do_not_mix(name, monkeypatch):
    """No prompt of a pool is decoded beside those of the one before it."""
    order, add = {}, RolloutBuffer.add
    monkeypatch.setattr(
        RolloutBuffer, "add", lambda self, g: (order.setdefault(g.id, len(order)), add(self, g))
    )
    pools = []
    for r in run_of(name, slots=9, spare=34, salt=3).each(14):
        pools += {order[group] // 6 for group in r.planned}
    assert pools == sorted(pools) and pools[-1] > 2, "a round has prompts of one pool"


def test_losers_of_the_next_round_begin_if_it_is_long():
    run = run_of("tail", slots=10)
    lost = {}
    for r in run.each(12):
        lost |= {g.id: r.version for g in r.left}
    assert any(lost.get(name, 99) < version for name, _, (version,) in run.begun)


def test_data_that_has_no_other_prompts():
    """The next race draws what the pool leaves, and nothing is begun of what is there already."""
    run = run_of("tail", slots=20, spare=0)
    for _ in run.each(8):
        assert len({group.prompt.uid for group in run.pool}) == len(run.pool) <= 7
