import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.data.repetition import Order, group_index, repeat_prompts

ORDERS = st.sampled_from(["interleave", "tile"])
SIZES = {"num_prompts": st.integers(0, 7), "num_generations": st.integers(2, 6)}


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    return (
        (rewards - rewards.mean(axis=1, keepdims=True)) * rewards.shape[1] / (rewards.shape[1] - 1)
    )


def test_orders_by_hand() -> None:
    assert repeat_prompts("ab", 3) == list("aaabbb")
    assert repeat_prompts("ab", 3, order="tile") == list("ababab")
    assert group_index(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert group_index(2, 3, order="tile").tolist() == [[0, 2, 4], [1, 3, 5]]


@given(**SIZES, order=ORDERS)
def test_references_are_repeated_and_every_row_is_one_prompt(
    num_prompts: int, num_generations: int, order: Order
) -> None:
    prompts = [object() for _ in range(num_prompts)]
    repeated = repeat_prompts(prompts, num_generations, order)
    index = group_index(num_prompts, num_generations, order)
    assert index.shape == (num_prompts, num_generations)
    assert sorted(index.ravel().tolist()) == list(range(len(repeated)))
    for prompt, row in zip(prompts, index, strict=True):
        assert all(repeated[position] is prompt for position in row)


@given(**SIZES, order=ORDERS, seed=st.integers(0, 99))
def test_advantages_do_not_see_an_offset_of_the_prompt(
    num_prompts: int, num_generations: int, order: Order, seed: int
) -> None:
    quality = (
        np.random.default_rng(seed).integers(0, 5, num_prompts * num_generations).astype(float)
    )
    offset = np.array(
        repeat_prompts([100.0 * p for p in range(num_prompts)], num_generations, order)
    )
    index = group_index(num_prompts, num_generations, order)
    advantages = leave_one_out((quality + offset)[index])
    np.testing.assert_allclose(advantages, leave_one_out(quality[index]), atol=1e-9)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-9)


@pytest.mark.parametrize(
    ("repeated", "regrouped"), [("interleave", "tile"), ("tile", "interleave")]
)
def test_the_offset_gives_a_wrong_pairing_away(repeated: Order, regrouped: Order) -> None:
    rewards = np.array(repeat_prompts([0.0, 100.0], 4, repeated))
    assert not leave_one_out(rewards[group_index(2, 4, repeated)]).any()
    assert abs(leave_one_out(rewards[group_index(2, 4, regrouped)])).min() > 10


@pytest.mark.parametrize("num_generations", [1, 0, -2])
def test_a_baseline_needs_two(num_generations: int) -> None:
    with pytest.raises(ValueError, match=rf"`num_generations={num_generations}`.*at least 2"):
        repeat_prompts(["a"], num_generations)
    with pytest.raises(ValueError, match=rf"`num_generations={num_generations}`"):
        group_index(1, num_generations)


def test_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="`order='rows'`"):
        repeat_prompts(["a"], 2, order="rows")  # type: ignore[arg-type]
