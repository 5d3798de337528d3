"""The methods that the data module calls on a LightningModule between rollout and update."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from lit_rlsched.training.advantages import group_relative
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep, RowCost


@dataclass(frozen=True, slots=True)
class RoundLogprobs:
    """Log-probs of a round's `N = P * G` completions, group after group, all `[N, C]`."""

    old: Tensor
    ref: Tensor
    mask: Tensor


@runtime_checkable
class Learner(Protocol):
    """A LightningModule that takes part in the round; for others `PlainLearner` answers."""

    needs_reference: bool
    """Whether the advantages or the loss need the reference model's log-probs."""
    skip_zero_advantage: bool
    """Whether a completion with zero advantage has zero gradient."""
    needs_group: bool
    """Whether an advantage is relative to the completion's group, not to the whole update."""
    tracks_rewards: bool
    """Whether rewards are given less what the run's statistics expect of their prompt."""

    def streaming_obstacle(self) -> str | None:
        """Say why gradients need the whole update, or `None` if they can be accumulated."""

    def accumulate(self, step: OptimizerStep, first: bool) -> None:
        """Add the gradients of these micro-batches to those of the next optimizer step.

        `first`: these are the first of that step, so older gradients are forgotten.
        """

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        """Whether the loss uses the engine's log-probs as the old policy's.

        `off_policy`: whether tokens drawn by earlier policies may be included.
        """

    def row_cost(self) -> RowCost | None:
        """Return the cost by which completions share a prompt, or `None` if they must not."""

    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Compute `old_logprobs` and, if needed, `ref_logprobs`, each `[B, C]`."""

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        """Compute advantages `[P, G]` from rewards `[P, G]`, NaN where there is none."""


def half_learner(module: object) -> str | None:
    """Return a warning for a module that defines some members of `Learner`, but not all."""
    defined = [name for name, value in vars(Learner).items() if callable(value)]
    names = [*Learner.__annotations__, *(n for n in defined if not n.startswith("_"))]
    found, missing = (
        [f"`{name}`" for name in names if hasattr(module, name) is has] for has in (True, False)
    )
    if not found or not missing:
        return None
    return (
        f"`{type(module).__name__}` defines {', '.join(found)}, but not {', '.join(missing)}, so "
        "it is trained as a module that defines none of them: with GRPO's advantages, and without "
        "a call of these methods. Define all members of `lit_rlsched.training.learner.Learner`, or "
        "give yours other names."
    )


class PlainLearner:
    """Stands in for a LightningModule that knows nothing of rollouts.

    Advantages are those of GRPO, and old log-probs are the engine's.
    """

    needs_reference = False
    skip_zero_advantage = False
    needs_group = True
    tracks_rewards = False

    def streaming_obstacle(self) -> str | None:
        return "it takes its micro-batches in `training_step`, after the whole update is drawn"

    def accumulate(self, step: OptimizerStep, first: bool) -> None:
        raise NotImplementedError

    def needs_engine_logprobs(self, off_policy: bool) -> bool:
        return False  # `score` returns them

    def row_cost(self) -> RowCost | None:
        return None  # `training_step` expects one completion per row of `input_ids`

    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        return {"old_logprobs": batch.rollout_logp}

    def compute_advantages(self, rewards: Tensor, logprobs: RoundLogprobs | None) -> Tensor:
        return group_relative(rewards)
