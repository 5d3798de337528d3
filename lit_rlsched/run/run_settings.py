"""The user's settings of a run: one object for its start, its loaders and its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_rlsched.data.rows import Rows
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.run.evaluation import EvaluationSettings
from lit_rlsched.types import Sampling


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run; `RolloutDataModule` describes those of its arguments' names."""

    data: Mapping[str, Rows | None]
    """Data sets by stage: `train`, `val`, `test`, `predict`."""
    rewards: RewardScheduler
    engine: RolloutEngine
    """One engine, or a pool of several."""
    sampling: Sampling
    """How completions are drawn in training."""
    evaluation: EvaluationSettings
    """Which completions of held-out prompts are drawn."""
    prompts_per_round: int
    num_generations: int
    steps_per_round: int
    num_iterations: int
    micro_batch_tokens: int
    mask_truncated_completions: bool
    tokenizer: str | None
    chat_template_kwargs: dict[str, Any] | None
    skip_special_tokens: bool
    shuffle: bool
    seed: int
    verify_sync: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per round."""
        return self.steps_per_round * self.num_iterations
