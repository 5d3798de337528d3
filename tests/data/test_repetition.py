import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lit_rlsched.data.repetition import places, repeat
from lit_rlsched.engines import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.training import advantages as ours
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round, reward_matrix
from lit_rlsched.types import Completion, Group, Prompt, Request, Sampling


class Recording(SimulatedEngine):
    """Keeps what is submitted."""

    def __init__(self) -> None:
        super().__init__(lambda request: 2)
        self.requests: list[Request] = []

    def submit(self, requests):
        requests = list(requests)
        self.requests += requests
        super().submit(requests)


def test_a_run_repeats_references_to_one_tokenised_prompt():
    prompts = [Prompt(uid, uid, tuple(range(100 * i, 100 * i + 50))) for i, uid in enumerate("abc")]
    visits = [Visit(prompt, f"{prompt.uid}@0") for prompt in prompts]
    engine, rule = Recording(), FullRound(3)
    session = simulated_session(engine, 4, 60, lambda: Admission(4))
    (drawn,) = simulated_rounds(session, visits, Sampling(8), 5, lambda number: rule)
    by_uid = {prompt.uid: prompt for prompt in prompts}
    assert len(engine.requests) == 15
    for request in engine.requests:
        assert request.prompt_ids is by_uid[request.id[0]].token_ids
    for group in drawn.trained:
        assert group.prompt is by_uid[group.id[0]] and len(group.completions) == 5


@given(st.data())
def test_every_row_is_of_one_prompt_whatever_is_there_of_it(data):
    """A reward that tells prompt and place: rows and columns are those of group and completion."""
    groups = [repeat(Prompt(str(p), "", (1,)), 5, str(p), Sampling(8)) for p in range(4)]
    for p, group in enumerate(groups):
        for c in group.completions:
            c.scores = [10.0 * p + c.index]
        kept = data.draw(st.lists(st.sampled_from(range(5)), min_size=1, unique=True))
        group.completions = [group.completions[i] for i in kept]
    matrix = reward_matrix(groups, [1.0])
    for p, row in enumerate(matrix.tolist()):
        assert all(math.isnan(r) or r == 10 * p + i for i, r in enumerate(row))
        there = {i for i, r in enumerate(row) if not math.isnan(r)}
        assert there == {c.index for c in groups[p].completions}
    assert [10.0 * p + i for p, i in places(groups)] == [
        c.scores[0] for group in groups for c in group.completions
    ]


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
