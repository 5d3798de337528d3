"""The user's settings of a run: one object for its start, its loaders and its rounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_rlsched.data.repetition import repeat
from lit_rlsched.data.rows import Rows
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.types import Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Which completions to draw of each held-out prompt."""

    sampling: Sampling
    num_generations: int
    """Sampled completions per prompt; may be 0."""
    greedy: bool
    """Whether to decode one more completion greedily."""
    threshold: float = 1.0
    """Minimum score by the first reward function of a correct completion."""

    def groups(self, prompt: Prompt, stage: str) -> tuple[Group | None, Group | None]:
        """Make the groups of the greedy and of the sampled completions."""
        greedy = sampled = None
        if self.greedy:
            argmax = Sampling(self.sampling.max_completion_length, temperature=0.0)
            greedy = repeat(prompt, 1, f"{stage}-greedy/{prompt.uid}", argmax)
        if self.num_generations:
            key = f"{stage}/{prompt.uid}"
            sampled = repeat(prompt, self.num_generations, key, self.sampling)
        return greedy, sampled


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """What completions may call, and how it is run."""

    environments: Environments
    max_tool_calling_iterations: int | None = None
    workers: int = 1
    timeout: float = 60.0
    """Seconds that a tool may take."""
    max_sessions: int | None = None
    tool_steps: int | None = None


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
    tools: ToolSettings | None = None
    whole_rounds: bool = False
    """Whether a pass over the prompts ends with its last whole round, as in TRL."""

    @property
    def has_objects(self) -> bool:
        """Whether each completion has an object of an environment."""
        return self.tools is not None and self.tools.environments.has_objects

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per round."""
        return self.steps_per_round * self.num_iterations
