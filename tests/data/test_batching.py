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


def spanned(*spans, advantage=1.0, reason="stop", dropped=None, uid="a"):
    """Tokens of several policy versions."""
    made = row(2, sum(n for _, n in spans), advantage, reason, dropped, uid)
    made.completion.version_spans = list(spans)
    return made


def test_stale_tokens_are_masked_by_hand():
    rows = [spanned((1, 2), (3, 1)), spanned((3, 4)), spanned((1, 1), (2, 2), (3, 3))]
    step = OptimizerStep(rows, 1000, only_version=3)
    assert (step.totals.sequences, step.totals.tokens) == (3, 1 + 4 + 3)
    masks = [
        (int(n), mask.tolist())
        for batch in step
        for n, mask in zip(batch.completion_lengths, batch.completion_mask, strict=True)
    ]
    width = len(masks[0][1])
    expected = {3: [0, 0, 1], 4: [1, 1, 1, 1], 6: [0, 0, 0, 1, 1, 1]}
    assert masks == [(n, row + [0] * (width - n)) for n, row in sorted(expected.items())]
    for batch in step:
        assert batch.step_tokens == 8 and batch.step_sequences == 3
        assert (batch.rollout_logp.ne(0).sum(1) == batch.completion_lengths).all()


def test_without_a_version_every_token_is_trained_on():
    rows = [spanned((1, 2), (3, 1)), spanned((1, 4))]
    step = OptimizerStep(rows, 1000)
    assert (step.totals.sequences, step.totals.tokens) == (2, 7)
    assert sum(int(b.completion_mask.sum()) for b in step) == 7


def test_a_row_without_a_fresh_token_still_counts_as_a_sequence():
    rows = [spanned((1, 2), (2, 3), uid="stale"), spanned((2, 1), (3, 1), uid="fresh")]
    step = OptimizerStep(rows, 1000, only_version=3)
    assert [r.group.id for r in step.rows] == ["fresh"]
    assert [r.group.id for b in step.micro_batches for r in b] == ["fresh"]
    assert (step.totals.sequences, step.totals.tokens) == (2, 1)
    assert step.padding().positions == 2 + 2
    step = OptimizerStep(rows, 1000, only_version=4)
    assert (len(step), step.rows, step.totals.sequences, step.totals.tokens) == (0, [], 2, 0)


def test_what_else_is_left_out_of_a_step_of_one_version():
    rows = [
        spanned((2, 2), (3, 3), dropped="nonfinite_logprob"),
        spanned((2, 2), (3, 3), reason="length"),
        spanned((2, 2), (3, 3), advantage=0.0),
        spanned((2, 2), (3, 3)),
    ]
    step = OptimizerStep(
        rows, 1000, mask_truncated=True, skip_zero_advantage=True, only_version=3
    )  # fmt: skip
    assert (step.totals.sequences, step.totals.tokens) == (3, 6)
    assert [len(batch) for batch in step.micro_batches] == [1]


versions = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(st.lists(versions.map(sorted), min_size=1, max_size=12), st.integers(14, 60))
def test_the_mask_is_on_the_tokens_of_the_version(drawn, budget):
    """Token by token: which version drew it."""
    rows = []
    for i, by_token in enumerate(drawn):
        spans = [(v, by_token.count(v)) for v in sorted(set(by_token))]
        rows.append(spanned(*spans, uid=str(i)))
    step = OptimizerStep(rows, budget, only_version=2)
    fresh = [by_token for by_token in drawn if by_token[-1] == 2]
    assert step.totals.sequences == len(drawn)
    assert step.totals.tokens == sum(by_token.count(2) for by_token in fresh)
    seen = 0
    for of_batch, batch in zip(step.micro_batches, step, strict=True):
        for one, mask in zip(of_batch, batch.completion_mask.tolist(), strict=True):
            by_token = drawn[int(one.group.id)]
            assert mask[: len(by_token)] == [float(v == 2) for v in by_token]
            assert not any(mask[len(by_token) :])
            seen += 1
    assert seen == len(fresh) == len(step.rows)
