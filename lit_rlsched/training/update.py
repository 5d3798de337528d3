"""From the scored groups of a round to its optimizer steps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.micro_batches import OptimizerStep, split_steps
from lit_rlsched.training.round import Round, drop_infinite_rewards, score_round, set_advantages
from lit_rlsched.training.selection import Selection
from lit_rlsched.types import Group, Sample, stable_hash


@dataclass(frozen=True, slots=True)
class Update:
    """Gives a round's groups their advantages, and deals them out to optimizer steps."""

    learner: Learner
    rule: RoundRule
    """That drew the round."""
    selection: Selection | None
    """Which completions are trained on."""
    weights: Sequence[float]
    """Of the reward functions."""
    seed: int
    """The run's."""
    runs: int
    """Trainers before this one."""
    steps_per_round: int
    num_iterations: int
    micro_batch_tokens: int
    mask_truncated: bool
    """Whether completions cut at the limit are left out of the loss."""
    mask_stale: bool
    """Whether tokens of earlier policy versions are."""
    forward_context: Callable[[], AbstractContextManager[Any]]
    """The Trainer's precision context."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a round."""
        return self.steps_per_round * self.num_iterations

    def assign_advantages(self, part: Round) -> None:
        """Select among a round's groups, or among some of them, and give them advantages."""
        learner, rule, selection = self.learner, self.rule, self.selection
        if not part.groups:
            return
        drop_infinite_rewards(part, self.weights)
        if selection and not selection.full_scope:
            self._select(part, selection)
        # the only step of a round needs none: its own forward pass gives the old log-probs
        several = self.num_steps > 1 and not learner.needs_engine_logprobs(rule.off_policy)
        plain = isinstance(learner, PlainLearner) and rule.off_policy
        if several or plain or learner.needs_reference:
            score_round(part, learner, self.micro_batch_tokens, self.forward_context)
        set_advantages(part, learner, self.weights)
        if selection and selection.full_scope:
            self._select(part, selection)

    def _select(self, part: Round, selection: Selection) -> None:
        seed = stable_hash(self.seed, "down_sampling", self.runs, part.number)
        selection.select(part, self.weights, self.learner.needs_group, seed)

    def step(self, round: Round, index: int) -> OptimizerStep:
        """One of the round's steps.

        Token means divide by the average of the round's steps, as in TRL: a token weighs the same
        in whichever step it is.
        """
        iteration, number = divmod(index, self.steps_per_round)
        groups = [g for g in round.groups if not all(c.dropped for c in g.completions)]
        deal = split_steps(len(groups), self.steps_per_round, self.seed, round.number, iteration)
        dealt = [groups[i] for i in deal[number]]
        step = self._step_of(dealt, round.version, accumulated=round.accumulated)
        if self.steps_per_round > 1:
            tokens = self._step_of(groups, round.version).totals.tokens / self.steps_per_round
            step.divisor = replace(step.divisor, tokens=tokens)
        return step

    def part_of_step(self, part: Round, divisor: tuple[int, int]) -> OptimizerStep:
        """A part of the round's only step; for `divisor` see `OptimizerStep`."""
        return self._step_of(part.groups, part.version, divisor=divisor)

    def _step_of(self, groups: Sequence[Group], version: int, **parts: Any) -> OptimizerStep:
        return OptimizerStep(
            [Sample(g, c) for g in groups for c in g.completions],
            self.micro_batch_tokens,
            mask_truncated=self.mask_truncated,
            skip_zero_advantage=self.learner.skip_zero_advantage,
            off_policy=self.rule.off_policy,
            only_version=version if self.mask_stale else None,
            row_cost=self.learner.row_cost,
            **parts,
        )
