"""The schedule of a run: everything that callbacks set, and which callbacks work together."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from lit_rlsched.run.run_settings import RunSettings
from lit_rlsched.scheduling.ahead_rollout import Correction
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.in_flight_updates import InFlight
from lit_rlsched.scheduling.micro_group_sampling import SlotSettings
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.scheduling.streamed_training import Streaming
from lit_rlsched.scheduling.time_limits import AdaptiveTimeout
from lit_rlsched.settings import UsageError
from lit_rlsched.training.learner import Learner
from lit_rlsched.training.selection import Selection


@dataclass(slots=True)
class Schedule:
    """Settings that the callbacks of one run have made, one field each; every run has a new one.

    A callback sets its field in `setup`, before the engine starts.
    """

    rule: RoundRule
    """Which prompts a round draws and when it ends: `SortedBatching`, `TailBatching`."""
    slots: SlotSettings = field(default_factory=SlotSettings)
    """How many completions decode at once, in which order: `MicroGroupSampling`."""
    lengths: CalibratedPredictor | None = None
    """Predicts the lengths of completions: `LengthPrediction`."""
    probe_tokens: int | None = None
    """Completion length at which it predicts; `None`: chosen by `resolved_probe_tokens`."""
    selection: Selection | None = None
    """Which completions are trained on: `DownSampling`."""
    max_num_gen_batches: int = 1
    """A round may draw this many times its prompts, to replace prompts whose completions all have
    the same reward: `DynamicSampling`."""
    streaming: Streaming | None = None
    """When gradients are computed during the rollout: `StreamedTraining`, `AheadRollout`."""
    ahead: Correction | None = None
    """Whether the next round is drawn during the update: `AheadRollout`."""
    fills_drain: bool = False
    """Whether free slots begin the next round: `DrainFilling`."""
    in_flight: InFlight | None = None
    """Whether it gets the weights of each optimizer step: `InFlightUpdates`."""
    timeouts: AdaptiveTimeout | None = None
    """How long reward functions may take: `AdaptiveTimeouts`."""
    mask_stale_tokens: bool = False
    """Exclude tokens of earlier policy versions from the loss: `SortedBatching`."""
    drafting: Drafting | None = None
    """How the engine drafts tokens, to verify several in a decode step: `Speculation`."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether rounds may begin with drafts."""
        old = self.rule.verifies_from is not None
        return self.rule.keeps_drafts or old or self.ahead == "verify" or self.fills_drain

    def resolved_probe_tokens(self, max_completion_length: int) -> int:
        """Completion length, in tokens, at which the predictor is asked."""
        if self.probe_tokens is None:
            return min(16, max_completion_length // 16)
        return self.probe_tokens


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run for a callback that sets its schedule."""

    settings: RunSettings
    learner: Learner
    callbacks: frozenset[str]
    """Class names of the Trainer's callbacks and of their base classes."""


def class_names(callbacks: Iterable[object]) -> frozenset[str]:
    """Return the names of the classes of callbacks and of their base classes."""
    return frozenset(of.__name__ for callback in callbacks for of in type(callback).__mro__)


REFUSED = {
    ("InFlightUpdates", "SortedBatching"): "Both decide when a round ends. Remove one of them.",
    ("InFlightUpdates", "TailBatching"): "Both decide when a round ends. Remove one of them.",
    ("InFlightUpdates", "StreamedTraining"): (
        "A round is drawn before the update that it would be part of begins. Remove one of them."
    ),
    ("AheadRollout", "SortedBatching"): "They do not work together yet. Remove one of them.",
    ("AheadRollout", "TailBatching"): "They do not work together yet. Remove one of them.",
    ("AheadRollout", "DrainFilling"): (
        "With `AheadRollout` free slots begin the next round already, or the round after it is "
        "drawn as a whole. Remove one of them."
    ),
    ("SortedBatching", "TailBatching"): "Both decide when a round ends. Remove one of them.",
    ("AheadRollout", "Speculation"): (
        "How many tokens of a round are drawn ahead depends on the number of decode steps, so it "
        "would draw other tokens. Remove one of them."
    ),
    ("DrainFilling", "Speculation"): (
        "How many tokens of the next round are begun depends on the number of decode steps, so it "
        "would draw other tokens. Remove one of them."
    ),
    ("InFlightUpdates", "Speculation"): (
        "New weights go in after a number of decode steps, so it would draw other tokens. Remove "
        "one of them."
    ),
    ("DynamicSampling", "SortedBatching"): (
        "`SortedBatching` draws no new prompts until its pool is used up, so a prompt could not be "
        "replaced. Remove one of them; `DownSampling(drop_uninformative=True)` leaves such prompts "
        "out of the update."
    ),
    ("MicroGroupSampling", "ParallelismPlanner"): (
        "`MicroGroupSampling` decodes no more completions than the key-value cache can hold, so "
        "nothing is preempted and `ParallelismPlanner` would only ever halve. Remove one of them."
    ),
}
"""Pairs of callbacks that cannot work together, and why."""
CHANGED = {
    ("AheadRollout", "StreamedTraining"): (
        "With `correction='verify'` gradients are streamed anyway, and `StreamedTraining` only "
        "sets `start`; with `importance` it is refused."
    ),
    ("DownSampling", "SortedBatching"): (
        "Completions are selected from whole groups, so rounds train on whole groups with every "
        "`advantage`."
    ),
    ("DrainFilling", "DynamicSampling"): (
        "A prompt that replaces another takes the slots of drafts, which go on when slots are free "
        "again."
    ),
    ("DrainFilling", "SortedBatching"): (
        "Drafts are begun of prompts that the pool holds beyond those of a round "
        "(`oversubscribe`) and, in the last round of a pool, of the next pool. They are verified "
        "in every mode."
    ),
    ("DrainFilling", "TailBatching"): (
        "Drafts are begun of fresh prompts and, where the next round is likely to be long, of "
        "losers that have no draft. Prompts with a draft are ahead in the next race."
    ),
    ("LengthPrediction", "MicroGroupSampling"): (
        "The predictions order the completions that wait for a slot: `longest_first` unless "
        "`order` says otherwise, `shortest_first` where rounds end early."
    ),
    ("DynamicSampling", "StreamedTraining"): (
        "The engine waits for the trainer between two decode steps, so little overlaps."
    ),
    ("LengthPrediction", "StreamedTraining"): (
        "If completions wait for slots, the engine waits for the trainer between two decode steps, "
        "so little overlaps."
    ),
    **{
        (name, "Speculation"): (
            "Completions are the same, but not always those that are in time: text that repeats "
            "needs fewer steps. `speculation/trained_over_drawn_speed` shows it."
        )
        for name in ("DynamicSampling", "SortedBatching", "TailBatching")
    },
    ("AdaptiveTimeouts", "TailBatching"): (
        "A race includes the reward: a call that hangs delays its prompt no longer than the "
        "adaptive time-out."
    ),
}
"""Pairs of callbacks that work together, where one changes the other. All other pairs just work."""


def check_pairs(names: Collection[str]) -> None:
    """Refuse callbacks that cannot work together.

    Args:
        names: Names of their classes.

    Raises:
        UsageError: names both callbacks and says what to do instead.
    """
    for pair, why in REFUSED.items():
        if set(pair) <= set(names):
            raise UsageError(f"`{pair[0]}` with `{pair[1]}`: {why}")


def pairs_as_markdown() -> str:
    """The table of pairs in `docs/explanation/architecture.md`."""
    lines = ["| callback | with | |", "|---|---|---|"]
    refused = {pair: f"**refused**. {why}" for pair, why in REFUSED.items()}
    for (first, second), note in (refused | CHANGED).items():
        lines.append(f"| `{first}` | `{second}` | {note} |")
    return "\n".join(lines)
