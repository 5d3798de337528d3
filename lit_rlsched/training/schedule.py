"""The user's settings of a run, and its schedule: everything that callbacks set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lit_rlsched.data.repetition import repeat
from lit_rlsched.data.rows import Rows
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.environments.protocol import ToolSettings
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.scheduling.admission import SlotSettings
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.prompt_choice import Chooser
from lit_rlsched.scheduling.rollpacker import AdaptiveTimeout
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.selection import Selection
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


class Replacement(Protocol):
    """Decides which prompts are replaced in their round; see `DynamicSampling`."""

    max_num_gen_batches: int

    def replaces(self, group: Group, due: int, prompts: int, weights: Sequence[float]) -> bool:
        """Whether another prompt takes the place of a complete group; if so, drop the group."""


@dataclass(slots=True)
class Schedule:
    """Settings that the callbacks of one run have made, one field each; every run has a new one.

    A callback sets its field in `apply`, before the engine starts.
    """

    rule: RoundRule
    """Which prompts a round draws, when it ends, and what becomes of tokens of earlier policies:
    `RolloutWindow`, `AsyncRollout`, `SortedBatching`, `TailBatching`."""
    slots: SlotSettings = field(default_factory=SlotSettings)
    """How many completions decode at once, in which order: `MicroGroupSampling`."""
    lengths: CalibratedPredictor | None = None
    """Predicts the lengths of completions: `LengthPrediction`."""
    probe_tokens: int | None = None
    """Completion length at which it predicts; `None`: chosen by `resolved_probe_tokens`."""
    selection: Selection | None = None
    """Which completions are trained on: `DownSampling`."""
    replacement: Replacement | None = None
    """Which prompts are replaced: `DynamicSampling`."""
    chooser: Chooser | None = None
    """Which prompts are drawn: `PromptChoice`."""
    pilot: int | None = None
    """Completions of a prompt before it is known whether it gets all: `PromptBudget`."""
    streaming: float | None = None
    """Share of an update that is ready before gradients are computed: `StreamedTraining`."""
    ahead: bool = False
    """Whether the next round is drawn during the update: `AsyncRollout`."""
    timeouts: AdaptiveTimeout | None = None
    """How long reward functions may take: `AdaptiveTimeouts`."""
    mask_stale_tokens: bool = False
    """Exclude tokens of earlier policy versions from the loss: `SortedBatching`."""
    compares_logprobs: dict[str, str] = field(default_factory=dict)
    """Settings that need the engine's log-probs to be those of the policy, and what for."""
    beside_update: list[str] = field(default_factory=list)
    """Callbacks that need an engine that decodes while the trainer computes."""
    trains_on_stale: str | None = None
    """Setting with which rounds train on tokens of earlier policy versions."""

    @property
    def max_num_gen_batches(self) -> int:
        """A round may draw this many times its prompts."""
        return 1 if self.replacement is None else self.replacement.max_num_gen_batches

    @property
    def stops_early(self) -> bool:
        """Whether groups end before all of their completions: `DownSampling(early_stop=True)`."""
        return self.selection is not None and self.selection.reward_range is not None

    def resolved_probe_tokens(self, max_completion_length: int) -> int:
        """Completion length, in tokens, at which the predictor is asked."""
        if self.probe_tokens is None:
            return min(16, max_completion_length // 16)
        return self.probe_tokens


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a switch may know of a run. The defaults are those of a run without a Trainer."""

    settings: RunSettings
    learner: Learner = field(default_factory=PlainLearner)
    callbacks: frozenset[str] = frozenset()
    """Class names of the callbacks and of their base classes."""
    trains: bool = True
    """Whether the run is a `fit`."""
    module: Mapping[str, Any] = field(default_factory=dict)
    """Hyperparameters of the module."""
    automatic: bool = False
    """Whether Lightning takes the module's optimizer steps."""
    ranks: int = 1
    """Number of processes that train."""
    sharded: str | None = None
    """Name of the strategy, if it shards the policy."""
    prompts: int | None = None
    """Number of training prompts, once they are read."""

    def streaming_obstacle(self) -> str | None:
        """Say why gradients of parts cannot form the update, or `None` if they can."""
        if (steps := self.settings.steps_per_round) > 1:
            return (
                f"with `steps_per_round={steps}` the groups of the first optimizer step are known "
                "only at the end of the round. Use `steps_per_round=1`; `num_iterations` may be "
                "any number"
            )
        if (why := self.learner.streaming_obstacle()) is None and self.automatic:
            return (
                "in automatic optimization Lightning forgets gradients before the first "
                "micro-batch. Use a module with manual optimization"
            )
        return why


@runtime_checkable
class Switch(Protocol):
    """A callback that sets fields of the schedule."""

    sets: str | None
    """What it decides, in words; two switches that decide the same are refused."""

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the fields. It needs no Trainer."""
