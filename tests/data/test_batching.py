import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.data.batching import (
    MicroBatch,
    OptimizerStep,
    StepTotals,
    split_by_tokens,
    split_steps,
)
from lit_rlsched.rollout.types import Completion, Group, Prompt, Row, Sampling


def row(prompt=3, completion=5, advantage=1.0, reason="stop", dropped=None, uid="a"):
    group = Group(uid, Prompt(uid, "x", tuple(range(1, prompt + 1))), Sampling(64, 0.7), [])
    done = Completion(0, list(range(10, 10 + completion)), [-0.5] * completion, [], reason)
    done.advantage, done.dropped = advantage, dropped
    return Row(group, done)


shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), max_size=40)


@given(shapes, st.integers(80, 400))
def test_every_row_once_and_within_the_budget(shapes, budget):
    rows = [row(p, c, uid=str(i)) for i, (p, c) in enumerate(shapes)]
    batches = split_by_tokens(rows, budget)
    assert sorted(r.group.id for b in batches for r in b) == sorted(r.group.id for r in rows)
    for batch in batches:
        assert max(map(len, batch)) * len(batch) <= budget
    lengths = [len(r) for b in batches for r in b]
    assert lengths == sorted(lengths)


@given(shapes.filter(bool), st.integers(80, 400))
def test_padding_is_counted_as_it_is_made(shapes, budget):
    step = OptimizerStep([row(p, c) for p, c in shapes], budget)
    made = list(step)
    positions = sum(b.input_ids.numel() for b in made)
    real = sum(int(b.prompt_lengths.sum() + b.completion_lengths.sum()) for b in made)
    assert (step.padding().positions, step.padding().padding) == (positions, positions - real)
    assert [b.is_first for b in made] == [i == 0 for i in range(len(made))]
    assert [b.is_last for b in made] == [i == len(made) - 1 for i in range(len(made))]
    assert sum(int(b.completion_mask.sum()) for b in made) == step.totals.tokens


def test_a_micro_batch_by_hand():
    rows = [row(1, 1, advantage=-2.0), row(2, 3)]
    batch = MicroBatch(rows, StepTotals(2, 4), is_first=True, is_last=True)
    assert batch.input_ids.tolist() == [[1, 10, 0, 0, 0], [1, 2, 10, 11, 12]]
    assert batch.prompt_lengths.tolist() == [1, 2]
    assert batch.completion_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.rollout_logp.tolist() == [[-0.5, 0, 0], [-0.5, -0.5, -0.5]]
    assert batch.advantages.tolist() == [-2.0, 1.0]
    assert batch.old_logp is None and batch.ref_logp is None
    assert (batch.step_sequences, batch.step_tokens) == (2, 4)
    assert (batch.temperature, batch.max_completion_length) == (0.7, 64)
    assert batch.to("cpu").input_ids.dtype == torch.long


def test_what_is_left_out_still_counts_in_the_normalisers():
    rows = [row(advantage=0.0), row(), row(reason="length"), row(dropped="nonfinite_logprob")]
    step = OptimizerStep(rows, 100, skip_zero_advantage=True)
    assert (step.totals.sequences, step.totals.tokens) == (3, 15)
    assert sum(len(b) for b in step.micro_batches) == 2
    step = OptimizerStep(rows, 100, mask_truncated=True)
    assert (step.totals.sequences, step.totals.tokens) == (3, 10)
    assert sum(len(b) for b in step.micro_batches) == 2


def test_a_step_may_be_empty():
    step = OptimizerStep([row(advantage=0.0)], 100, skip_zero_advantage=True)
    assert len(step) == 0 and list(step) == []
    assert step.padding().positions == 0


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_steps_share_the_groups_out(size, steps, seed):
    dealt = split_steps(size * steps, steps, seed)
    assert sorted(i for part in dealt for i in part) == list(range(size * steps))
    assert {len(part) for part in dealt} == {size}
    assert dealt == split_steps(size * steps, steps, seed)
