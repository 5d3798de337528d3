"""Verified completions of real runs on vLLM are draws of the newest policy: one seed of many.

`python -m benchmarks run draft_law` has all cases and ten seeds.
"""

from importlib.util import find_spec

import pytest

from benchmarks.draft_law import LARGE, RIGHT, cell, fisher, measure, p_value, write_model

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("case", RIGHT)
def test_verified_completions_are_draws_of_the_newest_policy(tmp_path, case):
    write_model(tmp_path)
    figures = measure(case, str(tmp_path), 0, LARGE)
    assert figures["p"] > 1e-3 and figures["completions"] == 4096
    assert 0 < figures["accepted_share"] < 1


@pytest.mark.slow
@needs_vllm
def test_stale_completions_are_not(tmp_path):
    write_model(tmp_path)
    assert measure("stale", str(tmp_path), 0, LARGE)["p"] < 1e-6


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
