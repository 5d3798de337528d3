"""Runs with several ranks, and what they must have in common."""

import pytest

ALONE, DDP, FSDP2 = {"ranks": 1}, {"ranks": 2, "strategy": "ddp"}, {"ranks": 2, "strategy": "fsdp2"}


def ended(result):
    """Check that every rank has ended well; return the result."""
    said = "\n".join(result["said"])
    assert set(result["codes"]) == {0}, said[-6000:]
    assert "does not compute its logits" not in said  # what a wrongly gathered model looks like
    return result


def check_same(results, tolerance):
    """Check that all have drawn the same completions and have weights within a tolerance."""
    alone, *others = map(ended, results)
    (only,) = alone["ranks"]
    for other in others:
        leader, *followers = other["ranks"]
        assert leader["rounds"] == only["rounds"]
        if any(only["losses"]):  # with automatic optimization there is one for each micro-batch
            assert leader["losses"] == pytest.approx(only["losses"], abs=10 * tolerance)
        assert leader["metrics"].keys() >= only["metrics"].keys()
        assert leader["counters"] == only["counters"]
        for follower in followers:
            assert follower["hooks"] == 0  # callbacks hear of rounds once
            assert follower["weights"] == leader["weights"]
            assert follower["metrics"] == leader["metrics"]
            assert follower["counters"] == leader["counters"]
        gap = float((other["weights"] - alone["weights"]).abs().max())
        assert gap <= tolerance, gap
