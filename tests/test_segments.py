"""A completion is a list of segments with an author: a policy version or an environment."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import every_loss, extra, gradient, random_batch

from lit_rlsched.rollout.packing import pack, unpack
from lit_rlsched.rollout.result import attempt
from lit_rlsched.training.micro_batches import OptimizerStep, StepTotals
from lit_rlsched.training.round_metrics import completion_metrics, staleness_metrics
from lit_rlsched.types import ENVIRONMENT, Completion, Event, Group, Prompt, Sample, Sampling

AUTHORS = st.sampled_from([ENVIRONMENT, 3, 4, 5])
TURNS = st.lists(st.tuples(AUTHORS, st.integers(1, 4)), max_size=6)


def completion_of(turns):
    """A completion, and the author of each of its tokens."""
    completion, authors = Completion(0), []
    for author, tokens in turns:
        ids = [len(authors) + i + 4 for i in range(tokens)]
        if author == ENVIRONMENT:
            completion.take_reply(ids)
        else:
            completion.take(Event("a", ids, [-0.5] * tokens), author)
        authors += [author] * tokens
    return completion, np.array(authors, dtype=int)


@given(TURNS)
def test_masks_and_lengths_follow_from_the_segments(turns):
    completion, authors = completion_of(turns)
    ours = authors != ENVIRONMENT
    assert sum(n for _, n in completion.segments) == len(completion.token_ids) == len(authors)
    assert completion.mask() == ours.astype(float).tolist()
    assert completion.drawn == attempt(completion).tokens == ours.sum()
    assert completion_metrics([completion])["completions/mean_length"] == ours.sum()
    for version in (3, 4, 5):
        assert completion.mask(version) == (authors == version).astype(float).tolist()
    assert completion.staleness(5) == (5 - authors[ours][0] if ours.any() else 0)
    shares = staleness_metrics([completion], 5)
    assert shares["staleness/mean"] == pytest.approx(
        (5 - authors[ours]).mean() if ours.any() else 0
    )
    group = Group("a@0", Prompt("a", "a", (1,)), Sampling(64), [completion])
    assert unpack(pack([group]), lambda _: group.prompt) == [group]
    step = OptimizerStep([Sample(group, completion)], 64)
    assert step.totals.tokens == ours.sum()
    for batch in step:
        assert batch.completion_mask.flatten().tolist() == completion.mask()
    assert StepTotals(1, 1, version=5).trained(completion) == (authors == 5).sum()


@every_loss
def test_tokens_of_an_environment_have_no_gradient(loss_type):
    batch = random_batch()
    batch["mask"] = (
        torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(1)) < 0.6
    )
    batch["mask"][:, 0] = True
    _, drawn = gradient(batch, **extra(loss_type))
    assert (drawn[~batch["mask"]] == 0).all() and (drawn[batch["mask"]] != 0).any()
    for name in ("old_logp", "ref_logp", "rollout_logp"):
        batch[name] = torch.where(batch["mask"], batch[name], -7.0)
    _, again = gradient(batch, **extra(loss_type))
    assert torch.equal(drawn, again)
