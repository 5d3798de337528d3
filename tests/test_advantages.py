import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lit_rlsched.training.advantages import (
    batch_normalized,
    combine_rewards,
    group_relative,
    kl_in_reward,
    leave_one_out,
    mean_kl,
    standard_deviation,
)

NAN = torch.nan
RULES = {
    "group": lambda r: group_relative(r, "group"),
    "batch": lambda r: group_relative(r, "batch"),
    "none": lambda r: group_relative(r, "none"),
    "rloo": lambda r: leave_one_out(r),
    "rloo_normalized": lambda r: leave_one_out(r, normalize=True),
    "reinforce++": batch_normalized,
}
every_rule = pytest.mark.parametrize("rule", RULES)


@st.composite
def groups(draw: st.DrawFn, nan: bool = False) -> Tensor:
    """`[P, G]` rewards of moderate size, some NaN if asked for."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(2, 6)))
    reward = st.integers(-40, 40).map(lambda n: n / 8)
    reward = st.one_of(reward, st.just(NAN)) if nan else reward
    size = shape[0] * shape[1]
    values = draw(st.lists(reward, min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float64).view(shape)


def test_group_relative_by_hand() -> None:
    rewards = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    scaled = 1 / (2**0.5 + 1e-4)
    torch.testing.assert_close(
        group_relative(rewards), torch.tensor([[-scaled, scaled], [0.0, 0.0]])
    )
    assert group_relative(rewards, "none").tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    batch = 1 / ((2 / 3) ** 0.5 + 1e-4)
    torch.testing.assert_close(group_relative(rewards, "batch")[0, 1].item(), batch)


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([[0.0, 3.0, 6.0], [NAN, 1.0, 2.0]])
    assert leave_one_out(rewards).tolist() == [[-4.5, 0.0, 4.5], [0.0, -1.0, 1.0]]
    normalized = leave_one_out(torch.tensor([[0.0, 2.0]]), normalize=True)
    assert normalized[0, 1].item() == pytest.approx(2 / (8**0.5 + 1e-4))


@every_rule
@given(rewards=groups(nan=True))
def test_advantages_sum_to_zero(rule: str, rewards: Tensor) -> None:
    advantages = RULES[rule](rewards)
    assert advantages.isfinite().all()
    assert (advantages[rewards.isnan()] == 0).all()
    zeros = torch.zeros(rewards.shape[0], dtype=torch.float64)
    if rule in (
        "rloo_normalized",
        "reinforce++",
    ):  # centred over the batch: what is left out still counts as 0
        torch.testing.assert_close(advantages.sum(), zeros.sum(), atol=1e-9, rtol=0.0)
    else:
        torch.testing.assert_close(advantages.sum(dim=1), zeros, atol=1e-9, rtol=0.0)


@every_rule
@given(rewards=groups(nan=True), shift=st.integers(-10, 10))
def test_a_constant_reward_changes_nothing(rule: str, rewards: Tensor, shift: int) -> None:
    torch.testing.assert_close(
        RULES[rule](rewards + shift), RULES[rule](rewards), atol=1e-9, rtol=1e-9
    )


@every_rule
@given(rewards=groups(nan=True), random=st.randoms(use_true_random=False))
def test_order_does_not_matter(rule: str, rewards: Tensor, random: object) -> None:
    rows, columns = (torch.tensor(_shuffled(n, random)) for n in rewards.shape)
    moved = RULES[rule](rewards[rows][:, columns])
    torch.testing.assert_close(moved, RULES[rule](rewards)[rows][:, columns])


def _shuffled(size: int, random: object) -> list[int]:
    order = list(range(size))
    random.shuffle(order)  # type: ignore[attr-defined]
    return order


@pytest.mark.parametrize("rule", ["group", "none", "rloo"])
@given(rewards=groups(nan=True), other=groups(nan=True))
def test_a_group_does_not_depend_on_the_others(rule: str, rewards: Tensor, other: Tensor) -> None:
    alone = torch.cat([RULES[rule](row.unsqueeze(0)) for row in rewards])
    torch.testing.assert_close(RULES[rule](rewards), alone)


@every_rule
@given(rewards=groups(nan=True))
def test_an_unscored_completion_is_as_if_never_drawn(rule: str, rewards: Tensor) -> None:
    unscored = torch.full((rewards.shape[0], 1), NAN, dtype=rewards.dtype)
    wider = RULES[rule](torch.cat([rewards, unscored], dim=1))
    torch.testing.assert_close(wider[:, :-1], RULES[rule](rewards))


@every_rule
def test_inputs_are_untouched(rule: str) -> None:
    rewards = torch.tensor([[0.0, NAN, 1.0], [NAN, NAN, 1.0]])
    before = rewards.clone()
    RULES[rule](rewards)
    torch.testing.assert_close(rewards, before, rtol=0, atol=0, equal_nan=True)


def test_combine_rewards() -> None:
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN], [1.0, NAN]])
    before = rewards.clone()
    combined = combine_rewards(rewards, torch.tensor([1.0, 0.25]))
    expected = torch.tensor([1.5, 0.5, NAN, 1.0])
    torch.testing.assert_close(combined, expected, equal_nan=True)
    torch.testing.assert_close(rewards, before, equal_nan=True)


def test_kl_in_reward_counts_the_completion_only() -> None:
    rewards = torch.tensor([1.0, NAN, 2.0])
    logp = torch.tensor([[-1.0, -2.0, NAN], [-1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    ref_logp = torch.tensor([[-2.0, -4.0, 7.0], [-1.0, 0.0, 0.0], [-0.5, 9.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]])
    penalised = kl_in_reward(rewards, logp, ref_logp, mask, beta=0.5)
    expected = torch.tensor([1.0 - 0.5 * 3.0, NAN, 2.0 + 0.5 * 0.5])
    torch.testing.assert_close(penalised, expected, equal_nan=True)


@st.composite
def tokens(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities `[N, C]` of policy and reference, NaN outside of the completions."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
    size = shape[0] * shape[1]
    weight = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    mask = torch.tensor(draw(st.lists(weight, min_size=size, max_size=size))).view(shape)
    values = st.lists(st.integers(-40, 0).map(lambda n: n / 8), min_size=size, max_size=size)
    logp, ref_logp = (torch.tensor(draw(values)).view(shape) for _ in range(2))
    return logp.masked_fill(mask == 0, NAN), ref_logp.masked_fill(mask == 0, NAN), mask


@given(tokens())
@example((torch.tensor([[-1.0, NAN]]), torch.tensor([[-3.0, NAN]]), torch.tensor([[1, 0]])))
@example((torch.tensor([[NAN]]), torch.tensor([[NAN]]), torch.tensor([[False]])))
def test_the_mean_kl_is_over_the_tokens_of_the_completions(
    sample: tuple[Tensor, Tensor, Tensor],
) -> None:
    logp, ref_logp, mask = sample
    each = (logp - ref_logp)[mask != 0].tolist()
    expected = statistics.fmean(each) if each else 0.0
    assert float(mean_kl(logp, ref_logp, mask)) == pytest.approx(expected, abs=1e-6)
    in_reward = kl_in_reward(torch.zeros(len(mask)), logp, ref_logp, mask, beta=1.0)
    assert float(in_reward.sum()) == pytest.approx(-expected * len(each), abs=1e-5)


@given(groups(nan=True))
def test_batch_normalized_is_over_all_that_is_there(rewards: Tensor) -> None:
    given = [r for r in rewards.flatten().tolist() if r == r]
    mean = statistics.fmean(given) if given else 0.0
    std = statistics.stdev(given) if len(given) > 1 else NAN
    expected = [
        0.0 if r != r or std != std else (r - mean) / (std + 1e-4)
        for r in rewards.flatten().tolist()
    ]
    torch.testing.assert_close(
        batch_normalized(rewards), torch.tensor(expected, dtype=torch.float64).view(rewards.shape)
    )


@pytest.mark.parametrize(
    "rewards", [[[5.0]], [[NAN]], [[NAN, 2.0], [NAN, NAN]], [[1.0, 1.0], [1.0, NAN]], [[NAN, NAN]]]
)
def test_nothing_to_compare_with_is_no_advantage(rewards: list) -> None:
    advantages = batch_normalized(torch.tensor(rewards, dtype=torch.float64))
    assert advantages.tolist() == [[0.0] * len(row) for row in rewards]


def test_standard_deviation_by_hand() -> None:
    rewards = torch.tensor([[0.0, 3.0, 6.0], [NAN, 1.0, 3.0], [NAN, NAN, 5.0], [NAN, NAN, NAN]])
    expected = torch.tensor([3.0, 2**0.5, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(standard_deviation(rewards), expected)


@every_rule
@pytest.mark.parametrize("reward", [0.1, 1e15 / 3])
def test_equal_rewards_are_no_advantage(rule: str, reward: float) -> None:
    advantage = RULES[rule]
    rewards = torch.tensor([[reward] * 4, [reward, NAN, reward, reward]], dtype=torch.float64)
    assert not advantage(rewards).any()


@pytest.mark.parametrize("rule", ["group", "none", "rloo"])
def test_equal_rewards_are_no_advantage_whatever_other_groups_have(rule: str) -> None:
    rewards = torch.tensor([0.1, 1e5 / 7, 7.7e9 / 3, 1e15 / 3], dtype=torch.float64)
    assert not RULES[rule](rewards[:, None].repeat(1, 7)).any()


@every_rule
@pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
def test_an_infinite_reward_is_none(rule: str, infinite: float) -> None:
    advantage = RULES[rule]
    rewards = torch.tensor([[0.0, 1.0, NAN], [2.0, 5.0, 3.0]])
    torch.testing.assert_close(
        advantage(rewards.nan_to_num(nan=infinite)), advantage(rewards), rtol=0, atol=0
    )
    assert advantage(torch.tensor([[0.0, 1e15]], dtype=torch.float64)).all()  # large, but finite


@every_rule
def test_a_small_difference_has_little_advantage(rule: str) -> None:
    rewards = torch.tensor([[1.0, 1.0 + 1e-6]], dtype=torch.float64)
    assert RULES[rule](rewards).abs().max() < 0.01  # the 1e-4 holds it down


def test_no_rewards_at_all() -> None:
    assert standard_deviation(torch.zeros(0, 3)).shape == (0,)
    assert group_relative(torch.zeros(0, 3)).shape == (0, 3)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_have_the_precision_of_the_rewards(rule: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([[0.0, 1.0]], dtype=dtype)
    assert RULES[rule](rewards).dtype == dtype
