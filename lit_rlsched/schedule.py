"""How rounds are drawn and trained on: what callbacks set, and which of them go together."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.scheduling.adaptive_timeouts import AdaptiveTimeout
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.micro_group_sampling import SlotSettings
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.streamed_training import Streaming
from lit_rlsched.training.learner import Learner
from lit_rlsched.training.selection import Selection
from lit_rlsched.types import Sampling

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule


@dataclass(slots=True)
class Schedule:
    """What the callbacks of one run have set, each its field; a new run has a new one.

    A callback writes its field in `setup`, before the engine starts.
    """

    rule: RoundRule
    """Which prompts a round takes and when it is over: `SortedBatching`, `TailBatching`."""
    slots: SlotSettings = field(default_factory=SlotSettings)
    """How many completions decode at once, in which order: `MicroGroupSampling`."""
    lengths: CalibratedPredictor | None = None
    """Predicts how long completions become: `LengthPrediction`."""
    probe_tokens: int | None = None
    """Tokens after which it is asked; `None`: by the longest completion. `LengthPrediction`."""
    selection: Selection | None = None
    """Which completions are trained on: `DownSampling`."""
    max_num_gen_batches: int = 1
    """Rounds' worth of prompts that a round may draw, where a prompt whose completions are all
    worth the same is replaced by another: `DynamicSampling`."""
    streaming: Streaming | None = None
    """When gradients are computed during the rollout: `StreamedTraining`."""
    timeouts: AdaptiveTimeout | None = None
    """How long reward functions may take: `AdaptiveTimeouts`."""
    mask_stale_tokens: bool = False
    """Leave tokens of earlier policy versions out of the loss: `SortedBatching`."""

    def resolved_probe_tokens(self, max_completion_length: int) -> int:
        """Tokens after which the predictor is asked."""
        if self.probe_tokens is None:
            return min(16, max_completion_length // 16)
        return self.probe_tokens


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a callback may know of the run whose schedule it sets; see `RolloutDataModule`."""

    prompts_per_round: int
    num_generations: int
    steps_per_round: int
    num_iterations: int
    sampling: Sampling
    engine: RolloutEngine
    learner: Learner
    callbacks: frozenset[str]
    """Names of the classes of the Trainer's callbacks, and of those that they inherit from."""

    @classmethod
    def of(cls, data: "RolloutDataModule") -> "RunFacts":
        """Of a data module whose Trainer is about to run."""
        assert data.trainer is not None
        callbacks = data.trainer.callbacks  # type: ignore[attr-defined]
        return cls(
            data.prompts_per_round,
            data.num_generations,
            data.steps_per_round,
            data.num_iterations,
            data.sampling,
            data.engine,
            data.run.learner,
            frozenset(of.__name__ for c in callbacks for of in type(c).__mro__),
        )


class Pair(NamedTuple):
    """Two callbacks that change each other's meaning."""

    first: str
    second: str
    refused: bool
    why: str
    """What happens, and where it is refused what to do instead."""


PAIRS = (
    Pair(
        "SortedBatching",
        "TailBatching",
        True,
        "Both decide when a round ends. Remove one of them.",
    ),
    Pair(
        "DynamicSampling",
        "SortedBatching",
        True,
        "`SortedBatching` loads no fresh prompts before its own are used up: a prompt could not be "
        "replaced. Leave one of them out; `DownSampling(drop_uninformative=True)` leaves such "
        "prompts out of the update.",
    ),
    Pair(
        "MicroGroupSampling",
        "ParallelismPlanner",
        True,
        "`MicroGroupSampling` lets no more decode than the key-value cache can hold, so that "
        "nothing is preempted and `ParallelismPlanner` would only ever halve. Remove one of the "
        "two.",
    ),
    Pair(
        "DownSampling",
        "SortedBatching",
        False,
        "A group is selected from as a whole: whole groups are trained on, whatever the advantage.",
    ),
    Pair(
        "LengthPrediction",
        "MicroGroupSampling",
        False,
        "The predictions order what waits for a slot: `longest_first` unless `order` says "
        "otherwise, `shortest_first` where rounds end early.",
    ),
    Pair(
        "DynamicSampling",
        "StreamedTraining",
        False,
        "The engine waits for the trainer between two steps, so little overlaps.",
    ),
    Pair(
        "LengthPrediction",
        "StreamedTraining",
        False,
        "Where completions wait for slots the engine waits for the trainer between two steps, so "
        "little overlaps.",
    ),
    Pair(
        "AdaptiveTimeouts",
        "TailBatching",
        False,
        "A race includes the reward: a call that hangs costs the prompt its place no longer than "
        "its own limit.",
    ),
)
"""All that is not listed goes together without one changing the other."""


def check_pairs(names: Collection[str]) -> None:
    """Refuse callbacks that cannot work together.

    Args:
        names: Of their classes.

    Raises:
        ValueError: names both and says what to do instead.
    """
    for pair in PAIRS:
        if pair.refused and {pair.first, pair.second} <= set(names):
            raise ValueError(f"`{pair.first}` with `{pair.second}`: {pair.why}")


def pairs_as_markdown() -> str:
    """The table of the documentation."""
    lines = ["| callback | with | |", "|---|---|---|"]
    for pair in sorted(PAIRS, key=lambda pair: not pair.refused):
        works = "**refused**. " if pair.refused else ""
        lines.append(f"| `{pair.first}` | `{pair.second}` | {works}{pair.why} |")
    return "\n".join(lines)
