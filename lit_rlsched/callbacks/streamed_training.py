"""RollPacker's stream trainer: gradients are computed while the rollout is still running."""

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.training.schedule import RunFacts, Schedule


class StreamedTraining(RolloutCallback):
    """Compute the gradients of finished groups while other groups still decode.

    RollPacker (arXiv 2509.21009, section 4.4). During a rollout the trainer runs forward and
    backward passes over groups as they are scored. At the end of the round it does so for the other
    groups and takes the first optimizer step.

    Bias: none; the update is the same up to rounding. Runs repeat bit for bit, but with
    `TailBatching(completion_ratio=...)` only up to rounding. The engine must decode in its own
    process, and gradients are in memory beside its cache. Little overlaps if decisions of the
    trainer change what the engine decodes, such as those of `DynamicSampling`.

    See `docs/explanation/streaming_and_parallelism.md`.

    Args:
        start: Share of an update's prompts that must be ready before the first gradients are
            computed.

    Raises:
        UsageError: `start` is out of range.
        UsageError: the engine is in the trainer's process, a round is divided over
            several optimizer steps, the module optimizes automatically, or advantages or loss need
            the whole update.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[StreamedTraining(), TailBatching()])
    """

    sets = "when gradients are computed"

    def __init__(self, start: float = 0.2) -> None:
        self.start = start

    def describe(self) -> str:
        """Return what the callback does in words."""
        return "gradients are computed while other completions decode"

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set when gradients are computed."""
        if facts.trains:
            schedule.streaming = self.start
            schedule.beside_update.append("`StreamedTraining`")
