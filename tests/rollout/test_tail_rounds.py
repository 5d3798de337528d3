"""What is special about tail batching: who wins, when a round is long, quotas of domains.

What it shares with other rules is in `test_rule_contract.py`.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruled_rounds import Case, Run, changed

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.tail_batching import PATIENCE, TailRound
from lit_rlsched.types import Completion, Group, Prompt, Sampling

races = pytest.mark.parametrize("completion_ratio", [1.0, 1.25])


def raced(
    update,
    size,
    prompt_ratio=1.25,
    completion_ratio=1.0,
    patience=PATIENCE,
    shares=None,
    **case,
):
    """A case of tail batching."""
    ratios = prompt_ratio, completion_ratio
    make = partial(TailRound, update, size, *ratios, patience, shares)
    return Case(make, size, "".join(shares or ""), **case)


@st.composite
def cases(draw, **fixed):
    update = fixed.get("update") or draw(st.integers(1, 5))
    drawn = {
        "update": update,
        "size": draw(st.integers(1, 3)),
        "prompt_ratio": draw(st.floats(1, 3)),
        "completion_ratio": draw(st.just(1.0) | st.floats(1, 3)),
        "patience": draw(st.sampled_from([PATIENCE, 0.0])),
        "slots": draw(st.integers(1, 40)),
        "stream": draw(st.booleans()),
        "key": draw(st.sampled_from(["id", "seed"])),
        "seed_domain": draw(st.integers(0, 2**32)),
        "spare": draw(st.integers(0, 6)),
        "latency": draw(st.integers(0, 12)),
    }
    if fixed.get("shares") is True:
        fixed["shares"] = draw(shares(update))
    return raced(**{**drawn, **fixed})


@st.composite
def shares(draw, update):
    """Of some domains, each with a prompt or more in an update."""
    whole = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    while sum(whole) > update:
        whole = [max(1, n - 1) for n in whole[: max(1, len(whole) - 1)]]
    whole[0] += update - sum(whole)
    return {"abc"[i]: n / update for i, n in enumerate(whole)}


def is_long(case, r):
    return case.rule.is_long(r.plan)


# Short rounds and long ones.


@given(cases())
def test_a_round_is_long_once_enough_have_lost(case):
    run, queue, update = Run(case), [], case.rule.update_prompts
    most = case.rule.most_prompts()
    for r in run.each(12):
        assert is_long(case, r) == (len(queue) >= update) and len(r.trained) == update
        if is_long(case, r):
            assert r.planned == queue[:update] == [g.id for g in r.trained]
            assert [len(g.completions) for g in r.plan] == [case.size] * update
            queue = queue[update:]
        else:
            assert len(r.plan) == most and not any(g.deferred for g in r.plan)
            assert not set(r.planned) & set(queue)
            won = {g.id for g in r.trained}
            queue += [name for name in r.planned if name not in won]
        assert [g.id for g in run.pool] == queue and len(queue) < most
        assert all(g.deferred == 1 and len(g.completions) == case.size for g in run.pool)


@pytest.mark.slow
@given(cases())
def test_nobody_starves(case):
    update, most = case.rule.update_prompts, case.rule.most_prompts()
    extra = most - update
    # short rounds until enough have lost, and the long ones of all that may be before it
    cycle = 1 + math.ceil(update / extra) if extra else 1
    first = {}
    for r in Run(case).each(20):
        for g in r.plan:
            first.setdefault(g.id, r.version)
        waits = cycle * (1 + most // update)
        assert all(r.version - first[g.id] <= waits for g in (*r.trained, *r.left))
        assert all(g.deferred <= 1 for g in (*r.trained, *r.left))
        assert all(c.attempts <= 1 for c in r.completions)


def test_with_the_default_every_fifth_round_is_long():
    for update in (4, 8):
        case = raced(update, 2)
        rounds = Run(case).rounds(15)
        assert [is_long(case, r) for r in rounds] == ([False] * 4 + [True]) * 3
        assert [r.metrics["rollout/pool_prompts"] for r in rounds[4::5]] == [0, 0, 0]


# When a round ends.


@given(cases(completion_ratio=1.0, patience=PATIENCE))
def test_a_round_ends_with_the_step_that_has_enough(case):
    for r in Run(case).each(8):
        won = [max(r.ended_at(g)) for g in r.trained]
        assert max(won) == r.trace.decode_steps
        ids = {g.id for g in r.trained}
        for g in r.plan:
            if g.id not in ids:  # it was not done before
                assert max(r.ended_at(g)) >= r.trace.decode_steps


@given(cases(patience=PATIENCE, slots=1000, key="id"))
def test_the_first_completions_of_a_prompt_are_kept(case):
    launched = range(case.rule.launched(case.size))
    for g in Run(case).round().trained:
        drawn = {
            i: min(case.limit, case.length(SimpleNamespace(id=f"{g.id}/{i}"))) for i in launched
        }
        last = sorted(drawn.values())[case.size - 1]
        assert max(drawn[c.index] for c in g.completions) == last
        assert [len(c.token_ids) for c in g.completions] == [drawn[c.index] for c in g.completions]
        # of those that tie, and of all that were done before it, none is passed over
        assert {i for i, n in drawn.items() if n < last} <= {c.index for c in g.completions}


# Scores.


@races
def test_a_race_waits_for_the_scores_of_those_that_are_ahead(completion_ratio):
    """They come a million turns later, and still win."""
    case = raced(3, 2, 2.0, completion_ratio, latency=0)
    prompts = [g.prompt.uid for g in Run(case).round().trained]
    for late in ((prompts[0],), tuple(prompts)):
        patient = Run(changed(case, late=late)).round()
        assert [g.prompt.uid for g in patient.trained] == prompts
        assert all(g.deferred == 0 for g in patient.trained)


@races
def test_without_patience_slow_scores_are_overtaken(completion_ratio):
    case = raced(3, 2, 2.0, completion_ratio, latency=0, patience=0.0)
    first = Run(case).round().trained[0].prompt.uid
    run = Run(changed(case, late=(first,)))
    hasty = run.round()
    assert first not in [g.prompt.uid for g in hasty.trained] and len(hasty.trained) == 3
    assert first in [g.prompt.uid for g in hasty.left]
    again = run.round()
    assert is_long(case, again)  # which waits for all of them
    assert first in [g.prompt.uid for g in again.trained]


def test_where_fewer_than_an_update_are_left_slow_scores_are_waited_for():
    case = raced(3, 2, 1.25, latency=0, patience=0.0)
    late = tuple(g.prompt.uid for g in Run(case).round().plan[:2])
    assert len(Run(changed(case, late=late)).round().trained) == 3  # one of the two was needed


# Quotas of domains.


def by_domain(groups, names):
    domains = [g.prompt.columns["domain"] for g in groups]
    return {d: domains.count(d) for d in names}


@given(cases(shares=True))
def test_each_domain_has_its_quota_of_every_short_round(case):
    rule, ratio = case.rule, case.make.args[2]
    quota = {d: round(share * rule.update_prompts) for d, share in rule.shares.items()}
    assert rule.quotas == quota
    raced = {d: math.ceil(round(ratio * n, 6)) for d, n in quota.items()}
    for r in Run(case).each(12):
        if not is_long(case, r):
            assert by_domain(r.plan, quota) == raced
            assert by_domain(r.trained, quota) == quota


@given(cases(spare=12, shares=True), st.integers(2, 4))
def test_what_is_certain_stays_so_where_prompts_of_domains_are_replaced(case, useless):
    trained = [g.id for r in Run(changed(case, useless=useless)).each(8) for g in r.trained]
    assert len(trained) == len(set(trained))  # and a round asserts what is certain


@given(cases())
def test_one_domain_is_none(case):
    *settings, _ = case.make.args
    twin = Run(case, TailRound(*settings, {"x": 1.0}))
    for r, t in zip(Run(case).each(), twin.each(), strict=True):
        assert r.result == t.result


def test_a_long_round_has_no_quotas_even_if_nothing_can_be_trained_on_of_what_waited():
    rule = TailRound(2, 1, 2.0, shares={"a": 0.5, "b": 0.5})

    def done(name, dropped=None, deferred=0):
        completion = Completion(0, [5], [-1.0], [(0, 1)], "stop", scores=[1.0], dropped=dropped)
        prompt = Prompt(name, name, (1,), {"domain": name[0]})
        return Group(f"{name}@0", prompt, Sampling(8), [completion], deferred)

    late = [done("b1", "uninformative", 1), done("b2", "uninformative", 1)]
    instead = [done("a1"), done("a2")]
    state = RoundState([*late, *instead], [*late, *instead], 4, patient=True, final=4)
    assert rule.done(state) and [g.id for g in rule.final_groups(state)] == ["a1@0", "a2@0"]
    assert not rule.split([*late, *instead], state)[1]


def test_a_prompt_that_nothing_can_be_trained_on_uses_up_no_quota():
    rule = TailRound(2, 1, 2.0, shares={"a": 0.5, "b": 0.5})

    def done(name, dropped=None):
        completion = Completion(0, [5], [-1.0], [(0, 1)], "stop", scores=[1.0], dropped=dropped)
        prompt = Prompt(name, name, (1,), {"domain": name[0]})
        return Group(f"{name}@0", prompt, Sampling(8), [completion])

    decoded = [done("a1", "uninformative"), done("b1"), done("b2")]
    state = RoundState(decoded, decoded, 3, patient=True, final=3)
    assert not rule.done(state) and [g.id for g in rule.final_groups(state)] == ["b1@0"]
    state.decoded.append(done("a2"))
    assert rule.done(state)
    trained, left = rule.split(decoded, state)
    assert [g.id for g in trained] == ["a1@0", "b1@0", "a2@0"]
    assert [(g.id, g.deferred) for g in left] == [("b2@0", 1)]
