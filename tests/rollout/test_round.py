import math
from dataclasses import dataclass

import pytest
import torch

from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.training.advantages import batch_normalized, group_relative
from lit_rlsched.training.learner import PlainLearner
from lit_rlsched.training.round import Round, cells, check_rewards, reward_matrix, set_advantages
from lit_rlsched.types import Completion, Group, Prompt, Sampling

NAN, KNOWN = torch.nan, PromptStatistics()


def group(name, scores, lengths=None):
    """Completions by their index, with their scores."""
    completions = []
    for index, given in scores.items():
        length = (lengths or {}).get(index, 2)
        completions.append(Completion(index, [5] * length, [-1.0] * length, [(0, length)], "stop"))
        completions[-1].scores = given
    return Group(f"{name}@0", Prompt(name, name, (1,)), Sampling(8), completions)


def ragged():
    return [
        group("a", {0: [1.0, 0.0], 3: [0.0, 2.0]}),
        group("b", {2: [None, 4.0]}),
        group("c", {0: [None, None], 1: [-1.0, None]}),
    ]


def same(tensor, rows):
    torch.testing.assert_close(
        tensor, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )


def test_a_reward_stands_in_its_completions_place():
    same(
        reward_matrix(ragged(), [1.0, 0.5]),
        [[1.0, NAN, NAN, 1.0], [NAN, NAN, 2.0, NAN], [NAN, -1.0, NAN, NAN]],
    )


def test_completions_that_no_function_was_asked_for_have_no_reward():
    groups = [group("a", {0: [], 1: None, 2: [1.0]})]
    same(reward_matrix(groups, [1.0]), [[NAN, NAN, 1.0]])


def test_completions_and_rows_go_group_after_group():
    round = Round(0, 0, ragged())
    assert [c.index for c in round.completions] == columns_of(round) == [0, 3, 2, 0, 1]
    assert [row.id for row in round.samples] == ["a@0/0", "a@0/3", "b@0/2", "c@0/0", "c@0/1"]


def columns_of(round):
    return cells(round.groups)[1].tolist()


class BatchLearner(PlainLearner):
    needs_group = False

    def compute_advantages(self, rewards, logprobs):
        assert logprobs is None
        return batch_normalized(rewards)


def test_advantages_reach_the_completions_they_are_of():
    round = Round(0, 0, ragged())
    set_advantages(round, BatchLearner(), [1.0, 0.5], KNOWN)
    std = math.sqrt((0.25**2 * 2 + 1.25**2 + 1.75**2) / 3) + 1e-4
    expected = [0.25 / std, 0.25 / std, 1.25 / std, 0.0, -1.75 / std]
    assert [c.advantage for c in round.completions] == pytest.approx(expected)


class Tracker(BatchLearner):
    tracks_rewards = True


def test_a_tracker_compares_with_what_was_known_before():
    known = PromptStatistics()
    known.observe(0, [group("a", {0: [], 1: []}), group("b", {0: []})], [[1.0, 0.0], [1.0]])
    groups = [group("a", {0: [1.0]}), group("b", {0: [0.0]}), group("c", {0: [1.0], 1: [None]})]
    set_advantages(Round(0, 0, groups), Tracker(), [1.0], known)
    a, b, new = known.means("abc")
    assert a < new < b  # an unknown prompt has the run's mean
    above = torch.tensor([[1 - a], [0 - b], [1 - new]], dtype=torch.float64)
    expected = [*batch_normalized(above).flatten().tolist(), 0.0]
    found = [c.advantage for each in groups for c in each.completions]
    assert found == pytest.approx(expected)


def test_a_place_in_the_matrix_does_not_change_a_group():
    """Two of four completions: compared with each other alone."""
    parts = [group("a", {1: [0.0], 3: [2.0]}), group("b", {0: [5.0], 2: [5.0]})]
    set_advantages(Round(0, 0, parts), PlainLearner(), [1.0], KNOWN)
    alone = group_relative(torch.tensor([[0.0, 2.0]], dtype=torch.float64))[0].tolist()
    assert [c.advantage for c in parts[0].completions] == pytest.approx(alone)
    assert [c.advantage for c in parts[1].completions] == [0.0, 0.0]


def test_rounding_noise_is_no_advantage():
    class Noise(PlainLearner):
        def compute_advantages(self, rewards, logprobs):
            return torch.full_like(rewards, 1e-9)

    round = Round(0, 0, ragged())
    set_advantages(round, Noise(), [1.0, 1.0], KNOWN)
    assert [c.advantage for c in round.completions] == [0.0] * 5


@dataclass
class Seen(PlainLearner):
    needs_reference = True
    logprobs: object = None

    def compute_advantages(self, rewards, logprobs):
        self.logprobs = logprobs
        return torch.zeros_like(rewards)


def test_logprobs_stand_in_the_same_places_as_the_rewards():
    groups = [group("a", {2: [1.0]}, {2: 3}), group("b", {0: [1.0], 1: [0.0]}, {0: 1, 1: 2})]
    for i, c in enumerate(Round(0, 0, groups).completions):
        c.old_logprobs = [-float(i + 1)] * len(c.token_ids)
        c.ref_logprobs = [-float(i + 11)] * len(c.token_ids)
    groups[1].completions[1].old_logprobs = groups[1].completions[1].ref_logprobs = None  # dropped
    learner = Seen()
    set_advantages(Round(0, 0, groups), learner, [1.0], KNOWN)
    none = [0.0, 0.0, 0.0]
    seen = learner.logprobs
    same(seen.old, [none, none, [-1.0] * 3, [-2.0, 0.0, 0.0], none, none])
    same(seen.ref, [none, none, [-11.0] * 3, [-12.0, 0.0, 0.0], none, none])
    same(seen.mask, [none, none, [1.0] * 3, [1.0, 0.0, 0.0], none, none])
    # row by row, as a learner flattens the rewards
    present = ~reward_matrix(groups, [1.0]).isnan().flatten()
    assert (seen.mask.any(dim=1) <= present).all()


def test_a_round_without_any_reward_stops_the_run():
    check_rewards(Round(0, 0, ragged()), [1.0, 1.0], 1)
    failed = Round(7, 0, [group("a", {1: [None], 3: [None]})])
    with pytest.raises(RuntimeError, match="None of the 2 completions of round 8 has a reward"):
        check_rewards(failed, [1.0], 2)
    check_rewards(failed, [1.0], 3)  # what a pool had left: that may be chance
