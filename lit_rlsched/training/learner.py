"""What the data module asks of whoever learns, between rollout and update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from lit_rlsched.training.advantages import group_relative
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep, RowCost
from lit_rlsched.types import Sample


@dataclass(frozen=True, slots=True)
class RoundLogprobs:
    """Log-probs of a round's `N = P * G` completions, group after group, all `[N, C]`."""

    old: Tensor
    ref: Tensor
    mask: Tensor


@runtime_checkable
class Learner(Protocol):
    """A LightningModule that takes part in the round; ours do, others get `PlainLearner`."""

    needs_reference: bool
    """Whether the advantages or the loss need the reference's log-probs."""
    skip_zero_advantage: bool
    """Whether a completion with zero advantage adds nothing to the gradient."""
    needs_group: bool
    """Whether a completion's advantage is relative to its siblings, or to all of the update."""

    def streaming_obstacle(self) -> str | None:
        """Why gradients cannot be computed before all of an update is drawn; `None`: they can."""

    def accumulate(self, step: OptimizerStep) -> None:
        """Add the gradient of these micro-batches to that of the coming optimizer step."""

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        """Whether the loss is relative to the log-probs that the engine recorded.

        `off_policy`: tokens of earlier policies may be among those that are trained on.
        """

    def row_cost(self, rows: Sequence[Sample], micro_batch_tokens: int) -> RowCost | None:
        """By what cost completions may share a row with their prompt, or `None`: they may not.

        `rows` are about to be laid out: a learner may try on them whether it gets them right.
        """

    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        """`old_logprobs` and, where needed, `ref_logprobs`, each `[B, C]`."""

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Advantages `[P, G]` of rewards `[P, G]`, NaN where there is no reward or completion."""


class PlainLearner:
    """Stands in for a LightningModule that knows nothing of rollouts.

    Advantages are group-relative; old log-probs are the engine's; no completion is left out.
    """

    needs_reference = False
    skip_zero_advantage = False
    needs_group = True

    def streaming_obstacle(self) -> str | None:
        """Its optimizer steps are Lightning's."""
        return "it takes its micro-batches in `training_step`, once all of them are there"

    def accumulate(self, step: OptimizerStep) -> None:
        """Refused before."""
        raise NotImplementedError

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        """Where tokens are of several policies, they are its `old_logp`."""
        return False

    def row_cost(self, rows: Sequence[Sample], micro_batch_tokens: int) -> RowCost | None:
        """Its `training_step` reads `input_ids` row by row."""
        return None

    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        """The engine's own log-probs."""
        return {"old_logprobs": batch.rollout_logp}

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """GRPO's."""
        return group_relative(rewards)
