import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lit_rlsched.data.repetition import Order, group_index, repeat_prompts
from lit_rlsched.training import advantages as ours
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round, reward_matrix
from lit_rlsched.types import Completion, Group, Prompt, Sampling

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


# What the branch measured in a public pull request did, written from its description: it decoded
# prompts, repeated the strings interleaved, tokenised them again with a `max_length` nobody had
# set, and left the baseline reshaped for the tiled order.


def branch_tokens(tokenizer, prompts, k):
    texts = tokenizer.batch_decode(prompts, skip_special_tokens=True)
    repeated = [text for text in texts for _ in range(k)]
    return tokenizer(repeated, truncation=True, max_length=1024)["input_ids"]


def branch_advantages(rewards, k):
    """Of interleaved rewards `[P * k]`."""
    tiled = rewards.reshape(k, -1)
    return (tiled - (tiled.sum(0) - tiled) / (k - 1)).flatten()


def our_round(prompts, rewards, k, completion=(5,) * 100):
    groups = [
        Group(
            str(p),
            Prompt(str(p), "", tuple(ids)),
            Sampling(100),
            [
                Completion(i, [*completion], [0.0] * 100, finish_reason="stop", scores=[r])
                for i, r in enumerate(rewards[p * k : (p + 1) * k].tolist())
            ],
        )
        for p, ids in enumerate(prompts)
    ]
    return Round(0, 0, groups)


def test_the_memory_that_was_saved_is_the_prompt_that_was_cut(tiny_model):
    tokenizer, k = AutoTokenizer.from_pretrained(tiny_model), 4
    prompts = [[5 + (p + i) % 30 for i in range(3000)] for p in range(2)]
    cut = branch_tokens(tokenizer, prompts, k)
    assert {len(ids) for ids in cut} == {1024}
    round = our_round(prompts, torch.zeros(2 * k), k)
    for batch in OptimizerStep(round.samples, 4 * 3100):
        assert batch.prompt_lengths.tolist() == [3000] * 4
        for ids, length in zip(batch.input_ids, batch.completion_lengths.tolist(), strict=True):
            assert ids[: 3000 + length].tolist() in [[*p, *[5] * 100] for p in prompts]


def test_the_baseline_of_the_branch_is_of_another_prompt(tiny_model):
    """A constant for all completions of a prompt must not change any advantage."""
    k, quality = 4, torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1], dtype=torch.float64)
    offset = torch.tensor([0.0, 10.0]).repeat_interleave(k)
    wrong = [branch_advantages(r, k) for r in (quality, quality + offset)]
    assert (wrong[0] - wrong[1]).abs().min() > 3
    prompts = [[5, 6], [7, 8]]
    right = [
        ours.leave_one_out(reward_matrix(our_round(prompts, r, k).groups, [1.0]))
        for r in (quality, quality + offset)
    ]
    torch.testing.assert_close(right[0], right[1], atol=1e-12, rtol=0)
    assert not torch.allclose(wrong[0], right[0].flatten(), atol=0.1)


@pytest.mark.parametrize("num_generations", [1, 0, -2])
def test_a_baseline_needs_two(num_generations: int) -> None:
    with pytest.raises(ValueError, match=rf"`num_generations={num_generations}`.*at least 2"):
        repeat_prompts(["a"], num_generations)
    with pytest.raises(ValueError, match=rf"`num_generations={num_generations}`"):
        group_index(1, num_generations)


def test_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="`order='rows'`"):
        repeat_prompts(["a"], 2, order="rows")  # type: ignore[arg-type]
