"""What `benchmarks run overlap` and `benchmarks run kept` compute without a model."""

import pytest
import torch

from benchmarks.kept import Draft, kept_share, spreads
from benchmarks.overlap import UNMOVED, FilledRound, rounds
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.training.block_verification import prefix_weights


@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_the_kept_share_is_that_of_a_normal_walk(spread):
    tokens, generator = 400, torch.Generator().manual_seed(0)
    sigma = spread / tokens**0.5
    noise = torch.randn(1000, tokens, generator=generator, dtype=torch.float64)
    kept = [prefix_weights(sigma * row - sigma**2 / 2, 0 * row)[1:].exp().mean() for row in noise]
    assert kept_share(spread) == pytest.approx(float(torch.stack(kept).mean()), abs=0.02)


def test_the_spread_has_the_mean_distance_of_round_and_age():
    drafts = [Draft(0, 1, 2, 10, 9.0, 0.2, 0.9), Draft(0, 1, 2, 40, 30.0, 0.3, 1.1)]
    other = Draft(0, 1, 4, 10, 5.0, 1.0, 4.0)
    first, second, third = spreads([*drafts, other])
    assert first.distance == pytest.approx((2 * torch.pi * 10) ** 0.5 * 0.01)
    assert second.distance == pytest.approx(2 * first.distance)
    assert third.distance == pytest.approx(10 * first.distance)
    assert (first.square, third.square) == pytest.approx(((10 * 0.04) ** 0.5, 2.0))


def test_drafts_of_an_unmoved_policy_leave_nothing_to_draw():
    plain = rounds(FullRound(4), False, 4, 2, UNMOVED, 1)
    ahead = rounds(FullRound(4), True, 4, 2, UNMOVED, 1)
    assert [d.rollout for d in ahead] == [0, 0] and all(d.ahead > 0 for d in ahead)
    assert all(d.drafts.accepted_tokens == d.trained == d.drafts.tokens for d in ahead)
    assert all(d.rollout > 0 and not d.drafts.tokens for d in plain)
    moved = rounds(FullRound(4), True, 4, 2, 0.01, 1)
    assert all(d.rollout > 0 for d in moved)


def test_free_slots_begin_the_next_rounds():
    first, second, _ = rounds(FilledRound(4, 1), False, 4, 3, UNMOVED, 1)
    assert not first.drafts.tokens and first.trained > 0
    assert 0 < second.drafts.tokens <= second.trained + first.trained
    assert second.rollout < first.rollout
