import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.tail_batching import TailRound, quotas
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sampling

weights = st.lists(st.integers(1, 20), min_size=1, max_size=5)


@given(weights, st.integers(1, 60))
def test_quotas_are_by_largest_remainder(weights, prompts):
    shares = {f"d{i}": w / sum(weights) for i, w in enumerate(weights)}
    try:
        found = quotas(shares, prompts)
    except ValueError as error:
        name = re.search(r"no prompt of '(\w+)'", str(error))[1]
        assert shares[name] * prompts < 1 + 1e-9
        return
    assert sum(found.values()) == prompts and found.keys() == shares.keys()
    rest = {d: shares[d] * prompts - n for d, n in found.items()}
    assert all(-1 < r < 1 for r in rest.values())
    up = [r + 1 for r in rest.values() if r < -1e-9]  # the remainders of those rounded up
    assert min(up, default=1) >= max((r for r in rest.values() if r > 1e-9), default=0) - 1e-9


def test_of_equal_remainders_the_first_is_rounded_up():
    assert quotas({"a": 0.25, "b": 0.5, "c": 0.25}, 6) == {"a": 2, "b": 3, "c": 1}
    assert quotas({"c": 0.25, "b": 0.5, "a": 0.25}, 6) == {"c": 2, "b": 3, "a": 1}


@pytest.mark.parametrize(
    ("shares", "prompts", "expected"),
    [
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, {"a": 1, "b": 2, "c": 7}),  # 0.7 * 10 is below 7
        ({"a": 0.29, "b": 0.71}, 100, {"a": 29, "b": 71}),  # 28.999999999999996
        ({"a": 0.6, "b": 0.4}, 2, {"a": 1, "b": 1}),
        (None, 7, {None: 7}),
    ],
)
def test_whole_quotas(shares, prompts, expected):
    assert quotas(shares, prompts) == expected


def prompts(**numbers):
    return [
        Prompt(f"{d}{i}", "?", (1,), {"domain": d}) for d, n in numbers.items() for i in range(n)
    ]


def race():
    """Three of x and one of y win; five of x and two of y race, and three may wait."""
    return TailRound(4, 1, 1.5, shares={"y": 0.25, "x": 0.75})


def test_prompts_that_race_and_wait_must_be_there():
    race().check_domains(prompts(x=8, y=5))
    for there, message in (
        ({"x": 7, "y": 5}, "hold 8 prompts of 'x' at once, 5 of them in a short round, .* only 7"),
        ({"x": 8, "y": 4}, "hold 5 prompts of 'y' at once, 2 of them in a short round, .* only 4"),
        ({"y": 5}, "hold 8 prompts of 'x' .* has only 0"),
    ):
        with pytest.raises(UsageError, match=message):
            race().check_domains(prompts(**there))
    TailRound(4, 1, 1.5).check_domains([Prompt("odd", "?", (1,))])


def test_a_domain_may_be_a_number():
    numbered = [Prompt(str(i), "?", (1,), {"domain": i % 2}) for i in range(4)]
    TailRound(2, 1, 1.0, shares={"0": 0.5, "1": 0.5}).check_domains(numbered)


def test_a_prompt_without_a_share_is_named():
    with pytest.raises(UsageError, match=r"The prompt z0 has the domain 'z'.*\['x', 'y'\]"):
        race().check_domains(prompts(x=8, y=5, z=1))
    with pytest.raises(UsageError, match=r"needs a column `domain` .* the prompt odd has none"):
        race().check_domains([*prompts(x=8), Prompt("odd", "?", (1,))])


def groups(names, deferred=0):
    """Scored groups; the first letter of a name is the domain."""
    return [
        Group(
            f"{name}@0",
            Prompt(name, "?", (1,), {"domain": name[0]}),
            Sampling(8),
            [Completion(0, [5], [-1.0], [(0, 1)], "stop", scores=[1.0])],
            deferred,
        )
        for name in names.split()
    ]


def uids(groups):
    return " ".join(g.prompt.uid for g in groups)


def test_each_domain_draws_what_it_lacks():
    rule = race()
    assert rule.most_prompts() == 7 and rule.draws([]) == [("y", 2), ("x", 5)]
    assert rule.draws(groups("x0 x1 x2 y0")) == [("y", 1), ("x", 2)]


def test_domains_take_turns():
    planned = race().plan(groups("x0 x1 x2 x3 x4 x5 y0 y1 y2"))
    assert uids(planned) == "x0 x1 y0 x2 x3 x4 y1"  # 1/5 2/5 1/2 3/5 4/5 1 1


def test_each_domain_has_its_own_winners():
    rule, planned = race(), groups("x0 x1 x2 x3 y0 y1")
    state = RoundState(planned, planned[:4], 4, patient=True, final=4)
    assert not rule.done(state) and uids(rule.final_groups(state)) == "x0 x1 x2"
    state = RoundState(planned, planned[:5], 5, patient=True, final=5)
    assert rule.done(state) and uids(rule.final_groups(state)) == "x0 x1 x2 y0"
    trained, left = rule.split(planned, state)
    assert (uids(trained), uids(left)) == ("x0 x1 x2 y0", "x3 y1")


def test_a_long_round_trains_on_losers_of_any_domain():
    rule, lost = race(), groups("y0 y1 y2 x0 x1", deferred=1)
    planned = rule.plan(lost)
    assert uids(planned) == "y0 y1 y2 x0" and rule.draws(lost) == []
    state = RoundState(planned, planned, 4, patient=True, final=4)
    assert rule.done(state) and uids(rule.final_groups(state)) == "y0 y1 y2 x0"
    assert uids(rule.split(planned, state)[0]) == "y0 y1 y2 x0"
