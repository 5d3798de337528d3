import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rlsched.training import micro_batches
from lit_rlsched.training.micro_batches import (
    EncodedRows,
    MicroBatch,
    OptimizerStep,
    PromptRow,
    RowCost,
    StepTotals,
    Trained,
    share_prompts,
    split_by_tokens,
)
from lit_rlsched.training.update import split_steps
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling


def row(prompt=3, completion=5, advantage=1.0, reason="stop", dropped=None, uid="a"):
    group = Group(uid, Prompt(uid, "x", tuple(range(1, prompt + 1))), Sampling(64, 0.7), [])
    done = Completion(0, list(range(10, 10 + completion)), [-0.5] * completion, [], reason)
    done.advantage, done.dropped = advantage, dropped
    return Sample(group, done)


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
    alone = [PromptRow((one,)) for one in rows]
    batch = MicroBatch(alone, StepTotals(2, 4), is_first=True, is_last=True)
    assert batch.input_ids.tolist() == [[1, 10, 0, 0, 0], [1, 2, 10, 11, 12]]
    assert batch.prompt_lengths.tolist() == [1, 2]
    assert batch.completion_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.rollout_logp.tolist() == [[-0.5, 0, 0], [-0.5, -0.5, -0.5]]
    assert batch.advantages.tolist() == [-2.0, 1.0]
    assert batch.old_logp is None and batch.ref_logp is None and batch.completion_rows is None
    assert (batch.step_sequences, batch.step_tokens) == (2, 4)
    assert (batch.temperature, batch.max_completion_length) == (0.7, 64)
    assert batch.to("cpu").input_ids.dtype == torch.long


def test_what_is_left_out_still_counts_in_the_normalisers():
    rows = [row(advantage=0.0), row(), row(reason="length"), row(dropped="nonfinite_logprob")]
    step = OptimizerStep(rows, 100, Trained(skip_zero_advantage=True))
    assert (step.totals.sequences, step.totals.tokens) == (3, 15)
    assert sum(len(b) for b in step.micro_batches) == 2
    step = OptimizerStep(rows, 100, Trained(mask_truncated=True))
    assert (step.totals.sequences, step.totals.tokens) == (3, 10)
    assert sum(len(b) for b in step.micro_batches) == 2


def test_a_step_may_be_empty():
    step = OptimizerStep([row(advantage=0.0)], 100, Trained(skip_zero_advantage=True))
    assert len(step) == 0 and list(step) == []
    assert step.padding().positions == 0


def test_nothing_is_trained_on_twice():
    """Whatever a callback has done to the advantages: the loss may have other terms."""
    part = OptimizerStep([row(advantage=1.0)], 100, divisor=(9, 99))
    for advantage, dropped in ((3.0, None), (1.0, "mine")):
        changed = [row(advantage=advantage, dropped=dropped), row(uid="b")]
        step = OptimizerStep(changed, 100, accumulated=[part])
        assert [[s.group.id for s in batch] for batch in step.micro_batches] == [["b"]]


def test_a_part_of_a_step_has_no_smaller_micro_batches_than_pay():
    """A pass over a few rows costs more than their padding, however small the part is."""
    rows = [row(3, length, uid=str(length)) for length in range(1, 61)]
    others = [row(3, length, uid=f"b{length}") for length in range(1, 61)]
    whole, part = OptimizerStep(rows, 4096), OptimizerStep(rows, 4096, divisor=(256, 9999))
    rest = OptimizerStep([*rows, *others], 4096, accumulated=[part])
    assert (len(whole), len(part), len(rest)) == (15, 4, 4)
    assert part.padding().padding < whole.padding().padding + 128 * (15 - 4)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_steps_share_the_groups_out(size, steps, seed):
    dealt = split_steps(size * steps, steps, seed)
    assert sorted(i for part in dealt for i in part) == list(range(size * steps))
    assert {len(part) for part in dealt} == {size}
    assert dealt == split_steps(size * steps, steps, seed)


def spanned(*spans, advantage=1.0, reason="stop", dropped=None, uid="a"):
    """Tokens of several policy versions."""
    made = row(2, sum(n for _, n in spans), advantage, reason, dropped, uid)
    made.completion.segments = list(spans)
    return made


def test_what_else_is_left_out_of_a_step_of_one_version():
    rows = [
        spanned((2, 2), (3, 3), dropped="nonfinite_logprob"),
        spanned((2, 2), (3, 3), reason="length"),
        spanned((2, 2), (3, 3), advantage=0.0),
        spanned((2, 2), (3, 3)),
    ]
    step = OptimizerStep(
        rows, 1000, Trained(mask_truncated=True, skip_zero_advantage=True, only_version=3)
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
    step = OptimizerStep(rows, budget, Trained(only_version=2))
    fresh = [by_token for by_token in drawn if 2 in by_token]
    assert step.totals.sequences == len(drawn)
    assert step.totals.tokens == sum(by_token.count(2) for by_token in fresh)
    seen = 0
    for of_batch, batch in zip(step.micro_batches, step, strict=True):
        assert batch.step_tokens == step.totals.tokens
        assert (batch.rollout_logp.ne(0).sum(1) == batch.completion_lengths).all()
        for one, mask in zip(of_batch, batch.completion_mask.tolist(), strict=True):
            by_token = drawn[int(one.group.id)]
            assert mask[: len(by_token)] == [float(v == 2) for v in by_token]
            assert not any(mask[len(by_token) :])
            seen += 1
    assert seen == len(fresh) == len(step.samples)


def group_of(prompt, *completions, uid="a"):
    """Rows of one group."""
    return [row(prompt, length, uid=uid) for length in completions]


ALWAYS = RowCost(position=1.0, causal=0.0, masked=0.0)

"""Sharing saves a prompt and costs nothing."""
MODEL = RowCost(position=2e6, causal=1000.0, masked=2000.0)


def test_a_shared_micro_batch_by_hand():
    step = OptimizerStep([*group_of(2, 3, 1), *group_of(1, 4, uid="b")], 100, row_cost=ALWAYS)
    alone, shared = step
    assert alone.input_ids.tolist() == [[1, 10, 11, 12, 13]] and alone.completion_rows is None
    assert shared.input_ids.tolist() == [[1, 2, 10, 10, 11, 12]]
    assert shared.completion_rows.tolist() == [0, 0]
    assert shared.prompt_lengths.tolist() == [2, 2]
    assert shared.completion_lengths.tolist() == [1, 3]
    assert shared.completion_mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert [len(rows) for rows in step.micro_batches] == [1, 2]
    assert [(b.is_first, b.is_last) for b in (alone, shared)] == [(True, False), (False, True)]
    assert (step.padding().positions, step.padding().padding) == (11, 0)
    assert all(tensor is None or tensor.device.type == "meta" for name, tensor in vars(
        shared.to("meta")
    ).items() if name == "completion_rows")  # fmt: skip


def test_long_prompts_are_shared_and_short_ones_are_not():
    shared = share_prompts(group_of(3000, *[100] * 8), MODEL, 16384)
    assert [len(r) for r in shared] == [3800]
    alone = share_prompts(group_of(45, *[1000] * 8), MODEL, 16384)
    assert [len(r) for r in alone] == [1045] * 8
    # one group as it is cheapest: in rows of a few
    some = share_prompts(group_of(600, *[200] * 8), MODEL, 16384)
    assert [len(r.samples) for r in some] == [4, 4]
    assert all(not r.shared for r in share_prompts(group_of(3000, 1, 1), None, 16384))


def test_two_costly_steps_pay_together():
    """A mask makes the second completion dearer than a row of its own, and all eight cheaper."""
    cost = RowCost(position=6.4e6, causal=2867.0, masked=12000.0)
    two, eight = group_of(3000, *[100] * 2), group_of(3000, *[100] * 8)
    assert len(share_prompts(two, cost, 16384)) == 2
    assert len(share_prompts(eight, cost, 16384)) < 8


groups = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=9)), max_size=6
)


@given(groups, st.integers(100, 400), st.sampled_from([1.0, 1e2, 1e4]))
def test_every_completion_once_and_never_dearer(shapes, budget, position):
    cost = RowCost(position, causal=1.0, masked=2.0)
    rows = [r for i, (p, cs) in enumerate(shapes) for r in group_of(p, *cs, uid=str(i))]
    shared = share_prompts(rows, cost, budget)
    assert sorted(id(r) for s in shared for r in s.samples) == sorted(map(id, rows))
    for one in shared:
        assert len({r.group.id for r in one.samples}) == 1
        assert len(one) <= budget and len(one) == EncodedRows.of([one]).input_ids.numel()
    paid = sum(cost(len(s), s.shared) for s in shared)
    assert paid <= sum(cost(len(r), False) for r in rows)


@given(groups, st.integers(100, 400), st.booleans())
def test_padding_of_shared_rows_is_counted_as_it_is_made(shapes, budget, skip):
    rows = [r for i, (p, cs) in enumerate(shapes) for r in group_of(p, *cs, uid=str(i))]
    for one in rows[::3]:
        one.completion.advantage = 0.0
    for one in rows[1::5]:
        one.completion.dropped = "nonfinite_logprob"
    step = OptimizerStep(rows, budget, Trained(skip_zero_advantage=skip), row_cost=ALWAYS)
    plain = OptimizerStep(rows, budget, Trained(skip_zero_advantage=skip))
    assert step.totals == plain.totals and step.samples == plain.samples
    trained = [r for rows in step.micro_batches for r in rows]
    assert {id(r) for r in trained} == {id(r) for rows in plain.micro_batches for r in rows}
    made = list(step)
    assert step.padding().positions == sum(b.input_ids.numel() for b in made)
    assert all(b.input_ids.numel() <= budget for b in made)
    assert step.padding().padding == sum(int((b.input_ids == 0).sum()) for b in made)
    assert sum(int(b.completion_mask.sum()) for b in made) == sum(
        len(r.completion.token_ids) for r in trained
    )


def test_the_mask_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(micro_batches, "MASKED_POSITIONS", 150)
    rows = [*group_of(50, *[20] * 8), *group_of(60, *[20] * 8, uid="b")]
    step = OptimizerStep(rows, 1000, row_cost=ALWAYS)
    for batch in step:
        assert batch.completion_rows is None or batch.input_ids.numel() <= 150
    assert step.padding().positions < OptimizerStep(rows, 1000).padding().positions
