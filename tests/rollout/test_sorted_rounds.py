"""What is special about sorted batching: pools, when a round ends, what is carried on.

What it shares with other rules is in `test_rule_contract.py`.
"""

import math
from functools import partial
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruled_rounds import Case, Run, changed

from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.scheduling.round_rule import at_least
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.types import Event


def pooled(
    update,
    pool,
    size,
    unit="group",
    mode="on_policy",
    max_staleness=None,
    oversubscribe=None,
    **case,
):
    """A case of sorted batching."""
    how = size, unit, mode, max_staleness, oversubscribe
    return Case(partial(SortedRound, update, pool, *how), size, **case)


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
        "seed_domain": draw(st.integers(0, 2**32)),
    }
    return pooled(**{**drawn, **fixed})


@given(cases())
def test_a_pool_is_trained_on_before_the_next_is_loaded(case):
    """In as many rounds as it has updates, or fewer: nobody starves."""
    run, rule = Run(case), case.rule
    enough = rule.update_prompts * (case.size if rule.unit == "completion" else 1)
    for _ in range(2):
        rounds = run.whole_pool()
        assert len(rounds) <= math.ceil(rule.pool_prompts / rule.update_prompts)
        names = {g.id for r in rounds for g in r.plan}
        assert len(names) == rule.pool_prompts and not len(run.pool)
        done = [(g.id, c.index) for r in rounds for g in r.trained for c in g.completions]
        assert sorted(done) == sorted((name, i) for name in names for i in range(case.size))
        for i, r in enumerate(rounds):
            assert all(c.attempts <= i for c in r.completions)
            units = len(r.lengths) if rule.unit == "completion" else len(r.trained)
            assert units >= enough or not r.left


@given(cases())
def test_a_round_ends_with_the_step_that_has_enough(case):
    rule = case.rule
    for r in Run(case).whole_pool():
        steps = [r.ended_at(g, 0) for g in r.trained]
        before, enough = sum(max(group) < r.trace.decode_steps for group in steps), 1
        if rule.unit == "completion":
            before = sum(step < r.trace.decode_steps for group in steps for step in group)
            enough = case.size
            assert not any(c.finished for g in r.left for c in g.completions)
        assert before < enough * rule.update_prompts


@given(cases())
def test_a_round_takes_the_front_of_the_pool_and_keeps_its_order(case):
    run, rule = Run(case), case.rule
    oversubscribe, most = case.make.args[-1], rule.pool_prompts
    if oversubscribe is not None:
        most = min(most, at_least(oversubscribe, rule.update_prompts))
    run.pool.plan(rule)
    waiting = [g.id for g in run.pool]
    for r in run.whole_pool():
        size = len(r.plan)
        assert r.planned == waiting[:size] and size >= min(most, len(waiting))
        assert rule.unit == "completion" or size <= most
        left = {g.id for g in r.left}
        waiting = [name for name in waiting if name in left or name not in r.planned]
        for groups in (r.plan, r.trained, r.left):
            for g in groups:
                places = [c.index for c in g.completions]
                assert places == sorted(places)


@given(cases(mode="partial", max_staleness=None))
def test_partial_throws_nothing_away(case):
    rounds = Run(case).whole_pool()
    assert not any(r.round_result.discarded for r in rounds)
    assert rounds[-1].metrics["pool/useful_token_share"] == 1.0
    assert rounds[-1].metrics["pool/trained_over_drawn_length"] == pytest.approx(1.0)
    assert all(c.attempts == 0 for r in rounds for c in r.completions)


@given(cases(mode="on_policy"))
def test_what_is_discarded_is_drawn_again(case):
    rounds = Run(case).whole_pool()
    discarded = [a for r in rounds for a in r.round_result.discarded]
    assert len(discarded) == sum(c.attempts for r in rounds for c in r.completions)


def test_what_was_begun_goes_on_before_others_begin():
    run = Run(pooled(1, 3, 2, mode="partial", slots=1, shuffle=False, spare=0))
    plan = run.pool.plan(run.rule)
    for group in plan[1:]:
        group.completions[1].take(Event("", [5, 6], [-1.0, -1.0]), version=0)
    rollout = Rollout(run.session, plan, 0)
    rollout.load_weights()
    rollout.run()
    turns = ["x001@0/1", "x002@0/1", "x000@0/0", "x000@0/1", "x001@0/0", "x002@0/0"]
    assert rollout.trace.spans["request"] == turns


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
@pytest.mark.parametrize("unit", ["group", "completion"])
def test_only_the_last_rounds_of_a_pool_drain(mode, unit):
    ratios = [r.trace.bubble_ratio for r in Run(pooled(4, 24, 2, unit, mode, slots=6)).whole_pool()]
    assert len(ratios) > 3
    assert ratios[0] == ratios[1] == ratios[2] == 0.0 < ratios[-1]
    assert Run(pooled(4, 4, 2, unit, mode, slots=6)).round().trace.bubble_ratio > 0


def test_the_short_go_first_where_all_decode():
    for seed_domain in range(20):
        case = pooled(3, 15, 2, "completion", "partial", seed_domain=seed_domain)
        lengths = [r.lengths for r in Run(case).whole_pool()]
        assert all(max(a) < min(b) for a, b in pairwise(lengths))


def test_on_policy_is_biased_towards_the_short_and_says_so():
    """A completion that is drawn anew forgets that it was a long one."""
    case = pooled(4, 16, 2, key="seed", limit=300)
    pools = [Run(changed(case, seed_domain=seed_domain)).whole_pool() for seed_domain in range(20)]
    trained = fmean(n for pool in pools for r in pool for n in r.lengths)
    whole = [
        Run(pooled(16, 16, 2, key="seed", limit=300, seed_domain=seed_domain)).round()
        for seed_domain in range(20)
    ]
    bias = trained / fmean(n for r in whole for n in r.lengths)
    said = fmean(pool[-1].metrics["pool/trained_over_drawn_length"] for pool in pools)
    assert bias < 0.8
    # of what was cut off when it was first drawn, no more is known than that it was longer
    assert bias < said < 0.8
