"""Verified completions of real runs on vLLM are draws of the newest policy: a few seeds of many.

`python -m benchmarks run draft_law` has all cases and ten seeds.
"""

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.draft_law import LARGE, RIGHT, cell, fisher, measure, p_value, write_model

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

SEEDS = (0, 1, 2, 3)
DOUBT = 0.01


def are_draws(p_of_seed):
    """Whether p-values are those of draws of the policy, by the first seed, or else by the others.

    One p-value in a hundred is below 0.01 by chance, and any change of what a run draws brings
    other ones. So a first seed below it is only a doubt, which the other seeds decide on alone, by
    Fisher's method: draws of the policy are refused once in 10,000. A fault of each seed that is
    found half the time by one seed at 1e-3 is found three times in four.
    """
    first, *others = SEEDS
    return p_of_seed(first) > DOUBT or fisher([p_of_seed(seed) for seed in others]) > DOUBT


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("case", RIGHT)
def test_verified_completions_are_draws_of_the_newest_policy(tmp_path, case):
    write_model(tmp_path)

    def p_of_seed(seed):
        figures = measure(case, str(tmp_path), seed, LARGE)
        assert figures["completions"] == 4096 and 0 < figures["accepted_share"] < 1
        return figures["p"]

    assert are_draws(p_of_seed)


@pytest.mark.slow
@needs_vllm
def test_stale_completions_are_not(tmp_path):
    write_model(tmp_path)
    figures = [measure("stale", str(tmp_path), seed, LARGE) for seed in SEEDS[:2]]
    assert max(each["p"] for each in figures) < 1e-6
    assert not are_draws(lambda seed: figures[seed > 0]["p"])


def test_what_is_refused():
    """Of p-values of Pearson's statistic with 18 degrees of freedom: the cells of a run are 19."""
    noise = np.random.default_rng(1)
    even = np.full(19, 1 / 19)
    off = even * (1 + 0.08 * (-1.0) ** np.arange(19))  # 4096 * 0.08**2: a noncentrality of 26
    off /= off.sum()

    def refused(chances, runs):
        def p(seed):
            counts = dict(enumerate(noise.multinomial(4096, chances).tolist()))
            return p_value(counts, dict(enumerate(even.tolist())))

        return sum(not are_draws(p) for _ in range(runs)) / runs

    assert refused(even, 2000) <= 0.002
    assert refused(off, 500) > 0.6


def test_what_a_cell_is():
    assert cell([3, 4, 5, 6, 1]) == (5, True, (3, 4, 5))
    assert cell([1]) == (1, True, (1,))


def test_p_values():
    fair = {0: 0.5, 1: 0.5}
    assert p_value({0: 50, 1: 50}, fair) == 1
    assert p_value({0: 60, 1: 40}, fair) == pytest.approx(0.0455, abs=1e-4)  # two sigma
    assert p_value({0: 100}, fair) < 1e-22
    # the rare ones are one cell: expected 4 + 4 of 1,000
    rare = {0: 0.992, 1: 0.004, 2: 0.004}
    assert p_value({0: 992, 1: 8}, rare) == 1
    assert fisher([0.5]) == pytest.approx(0.5)
    assert fisher([0.01, 0.01]) == pytest.approx(0.0010, abs=1e-4)
    assert fisher([0.0, 0.5]) < 1e-100
