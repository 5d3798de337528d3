"""Turn a round's scored groups into optimizer steps."""

import math
import random
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from lit_rlsched.ranks import Team
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep, Trained
from lit_rlsched.training.precision import ForwardContext
from lit_rlsched.training.round import NONFINITE, Round, cells, reward_matrix, set_advantages
from lit_rlsched.training.schedule import RunSettings, Schedule
from lit_rlsched.training.selection import Selection
from lit_rlsched.types import Group, Sample, stable_hash


@dataclass(frozen=True, slots=True)
class Update:
    """Turns a scored round into optimizer steps."""

    settings: RunSettings
    schedule: Schedule
    learner: Learner
    runs: int = 0
    """Trainers before this one."""
    forward_context: ForwardContext = nullcontext
    team: Team = field(default_factory=Team)
    statistics: PromptStatistics = field(default_factory=PromptStatistics)

    @property
    def weights(self) -> Sequence[float]:
        """Of the reward functions."""
        return self.settings.rewards.weights

    @property
    def off_policy(self) -> bool:
        """Whether a round may train on tokens of earlier policies."""
        return self.schedule.ahead or self.schedule.rule.off_policy

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a forward pass before the update has to compute `old_logprobs`.

        For the only step of a round, the forward pass of the step does.
        """
        several = self.settings.steps_per_epoch > 1
        return several and not self.learner.needs_engine_logprobs(self.off_policy)

    def assign_advantages(self, part: Round) -> None:
        """Select completions of a round or of a part of it, and assign their advantages."""
        learner, selection = self.learner, self.schedule.selection
        if not part.groups:
            return
        rewards = reward_matrix(part.groups, self.weights)[cells(part.groups)].tolist()
        for completion, reward in zip(part.completions, rewards, strict=True):
            if math.isnan(reward) and any(s is not None for s in completion.scores or ()):
                completion.dropped = completion.dropped or NONFINITE  # beyond `LARGEST_REWARD`
        if selection and not selection.full_scope:
            self._select(part, selection)
        plain = isinstance(learner, PlainLearner) and self.off_policy
        if self.needs_old_logprobs or plain or learner.needs_reference:
            self._score(part)
        set_advantages(part, learner, self.weights, self.statistics)
        if selection and selection.full_scope:
            self._select(part, selection)

    def _select(self, part: Round, selection: Selection) -> None:
        seed = stable_hash(self.settings.seed, "down_sampling", self.runs, part.number)
        selection.select(part, self.weights, self.learner.needs_group, seed)

    @torch.no_grad()
    def _score(self, part: Round) -> None:
        """Compute the log-probs that are needed under the weights at the start of the round."""
        tokens, cost = self.settings.micro_batch_tokens, self.learner.row_cost()
        step = OptimizerStep(part.samples, tokens, row_cost=cost)
        with self.forward_context():  # around all, which casts the weights once
            scores = self.team.share("score", self.score, step)
            for samples, scored in zip(step.micro_batches, scores, strict=True):
                for name, values in scored.items():
                    rows = values.double().numpy()
                    for sample, logprobs in zip(samples, rows, strict=True):
                        length = len(sample.completion.token_ids)
                        setattr(sample.completion, name, array("d", logprobs[:length].tobytes()))

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Compute log-probs `[B, C]` of a micro-batch by name, on the CPU; a task of the team."""
        with self.forward_context():
            return {name: values.cpu() for name, values in self.learner.score(batch).items()}

    def accumulate_part(self, part: Round, divisor: tuple[int, int], first: bool) -> OptimizerStep:
        """Accumulate this rank's share of the gradients, as `Learner.accumulate` does; a task."""
        step = self._step_of(part.groups, part.version, divisor=divisor)
        self.learner.accumulate(step, first)
        return step

    def accumulate_again(self, round: Round, taken: int) -> None:
        """Recompute the gradients that a resumed round has lost, each rank its share."""
        if round.lost is None or taken or self.learner.streaming_obstacle() is not None:
            return
        groups = {group.id: group for group in round.groups}
        parts: list[OptimizerStep] = []
        divisor, ids = round.lost
        for names in ids:
            part = Round(round.number, round.version, [groups[name] for name in names])
            parts.append(self.accumulate_part(part, divisor, not parts))
        round.accumulated, round.lost = parts, None  # at once: SIGTERM may come before

    def step(self, round: Round, index: int) -> OptimizerStep:
        """Build one of the round's optimizer steps.

        Token means other than bnpo's divide by the average over the round's steps, as in TRL, so a
        token has the same weight in every step.
        """
        seed, steps = self.settings.seed, self.settings.steps_per_round
        iteration, number = divmod(index, steps)
        groups = round.groups
        if steps > 1:
            groups = [g for g in groups if not all(c.dropped for c in g.completions)]
        parts = split_steps(len(groups), steps, seed, round.number, iteration)
        members = [groups[i] for i in parts[number]]
        accumulated = round.accumulated if index == 0 else ()
        step = self._step_of(members, round.version, accumulated=accumulated)
        if steps > 1:
            tokens = self._step_of(groups, round.version).totals.tokens / steps
            step.divisor = replace(step.divisor, tokens=tokens, own_tokens=step.totals.tokens)
        return step

    def _step_of(self, groups: Sequence[Group], version: int, **parts: Any) -> OptimizerStep:
        trained = Trained(
            self.settings.mask_truncated_completions,
            self.learner.skip_zero_advantage,
            self.off_policy,
            only_version=version if self.schedule.mask_stale_tokens else None,
        )
        return OptimizerStep(
            [Sample(g, c) for g in groups for c in g.completions],
            self.settings.micro_batch_tokens,
            trained,
            row_cost=self.learner.row_cost(),
            rank=(self.team.rank, self.team.size),
            **parts,
        )


def split_steps(num_groups: int, steps_per_round: int, *seed_parts: object) -> list[list[int]]:
    """Distribute a round's groups over its optimizer steps, in an order given by `seed_parts`."""
    order = list(range(num_groups))
    if steps_per_round > 1:
        random.Random(stable_hash(*seed_parts)).shuffle(order)
    ends = [i * num_groups // steps_per_round for i in range(steps_per_round + 1)]
    return [order[start:end] for start, end in pairwise(ends)]
