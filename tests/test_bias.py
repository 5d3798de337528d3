"""Which schedules have a biased gradient, exactly: by the sums of `benchmarks run bias`."""

import pytest

from benchmarks.bias import SCHEDULES, bias, expected, measure, mismatch, policies
from benchmarks.bias_cases import Cases

MOVING = {prompts: policies(0.05, prompts=prompts) for prompts in (2, 3)}
ALWAYS = [
    "full rounds",
    "`MicroGroupSampling` (one slot)",
    "`RolloutWindow(2)` (three slots)",
    '`DownSampling(rule="random")`',
    "three prompts, full rounds",
    pytest.param("three prompts, `RolloutWindow(2)` (three slots)", marks=pytest.mark.slow),
    pytest.param("three prompts, `RolloutWindow(3)` (four slots)", marks=pytest.mark.slow),
]
OVER_A_POOL = [
    "`RolloutWindow(2, overtake=1)`",
    "three prompts, `RolloutWindow(3, overtake=1)`",
    "three prompts, `RolloutWindow(3, overtake=2)`",
]
NEVER = [
    '`SortedBatching(mode="on_policy")`',
    '`DownSampling(rule="max_variance")`',
    '`DownSampling(rule="max_reward")`',
]


@pytest.mark.parametrize("name", ALWAYS)
def test_unbiased_in_every_update(name):
    figures = measure(SCHEDULES[name], MOVING[SCHEDULES[name].prompts])
    assert (
        max(figures[n] for n in ("bias of an update", "bias of a pool", "bias, policy moves"))
        < 1e-12
    )


@pytest.mark.parametrize("name", OVER_A_POOL)
def test_unbiased_over_a_pool_but_not_in_an_update(name):
    frozen = MOVING[SCHEDULES[name].prompts][:1]
    found = expected(SCHEDULES[name], frozen)
    assert bias(found.all, frozen[0]) < 1e-12 and bias(found.last, frozen[0]) > 0.1


@pytest.mark.parametrize("name", NEVER)
def test_biased_over_a_pool_too(name):
    frozen = MOVING[2][:1]
    assert bias(expected(SCHEDULES[name], frozen).all, frozen[0]) > 0.05


def test_stale_completions_are_biased_where_the_policy_moves():
    figures = measure(SCHEDULES['`AsyncRollout(1, 2, "wait")`'], MOVING[2])
    assert figures["bias of an update"] < 1e-12 and figures["bias, policy moves"] > 0.05
    whole = measure(SCHEDULES['... `old_logprobs="trainer"`, `"sequence_truncate"`'], MOVING[2])
    assert whole["bias, policy moves"] < 1e-12  # no ratio reaches the maximum


def test_an_engine_that_differs_costs_less_than_the_bound():
    for noise in (1e-3, 0.05):
        figures = mismatch(noise, range(2))
        assert 0.01 * noise < figures["of verified ones"] < figures["bound"]
    assert mismatch(0, [0])["of verified ones"] < 1e-12


def test_every_case_comes_once():
    cases, seen = Cases(), []
    for case in cases:
        first = case.choose([("a", 0.25), ("b", 0.75)])
        rest = [case.choose([(0, 0.5), (1, 0.5)]) for _ in range(2 if first == "a" else 0)]
        seen.append((first, *rest, case.probability))
    assert seen == [*(("a", i, j, 0.0625) for i in (0, 1) for j in (0, 1)), ("b", 0.75)]
