"""RollPacker's stream trainer: gradients of what is ready, while the tail decodes."""

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.streamed_training import Streaming


class StreamedTraining(RolloutCallback):
    """Compute the gradients of finished groups while the others still decode.

    RollPacker (arXiv 2509.21009, section 4.4). The trainer, idle during a rollout, encodes groups
    as they are scored and adds up their gradients; when the round is over it computes those of the
    rest and takes the one optimizer step. While the update's totals are not known, losses are
    divided by a fixed number, and the sum of the gradients by the true one before the step: the
    update is the one without this callback but for rounding, whatever finished when. Which groups
    share a micro-batch follows from the order in which they were decoded, so that a run repeats
    bit for bit; but for rounding only where completions are aborted in the middle of a round
    (`TailBatching` with `completion_ratio`, early stop): they decode on for some steps.

    The engine must decode by itself meanwhile: `ProcessEngine(engine=VLLMEngine())`. Where what is
    decided in the trainer changes what others decode (`DynamicSampling`; or, where completions wait
    for slots: `LengthPrediction`, a memory budget, early stop, a race of completions), the engine
    waits for the trainer between two steps, for the sake of runs that repeat, and little overlaps.
    Nothing is moved between devices, unlike in the paper, which gives GPUs of the rollout to the
    trainer: both keep what they have, and gradients are in memory beside the engine's cache.

    Gradients are in no checkpoint: a run that is resumed between a rollout and its update computes
    all of them anew, equal but for rounding.

    Each round logs `streamed_training/streamed_share` (of the completions, those whose gradients
    were there when the round was over), `streamed_training/gradient_seconds` (spent on them) and
    `streamed_training/overlap_seconds` (of these, while the engine was in a step);
    `rollout/ahead_steps` are decode steps that the engine had made when the round was over, and
    that are dropped.

    Args:
        start: Share of an update's prompts that must be ready before the first gradient: before,
            the engine has the machine for itself.

    Raises:
        ValueError: `start` is out of range.
        MisconfigurationException: the engine is in the trainer's process, a round has more than one
            optimizer step, or advantages or loss need the whole update.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[StreamedTraining(), TailBatching()])
    """

    sets = "when gradients are computed"

    def __init__(self, start: float = 0.2) -> None:
        if not isinstance(start, int | float) or not 0 <= start < 1:
            raise ValueError(
                f"`StreamedTraining({start=})`: must be 0 or more and below 1, a share of the "
                "update's prompts."
            )
        self.start = start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put it into the schedule, unless gradients would not be those of the update."""
        if stage != "fit":
            return
        schedule, run = rollout_schedule(trainer, self)
        if not run.engine.decodes_by_itself:
            name = type(run.engine).__name__
            raise MisconfigurationException(
                f"`StreamedTraining` needs an engine that decodes while the trainer computes, and "
                f"`{name}` does so only when it is called. Use `engine=ProcessEngine({name}(...))`."
            )
        if run.steps_per_round * run.num_iterations > 1:
            raise MisconfigurationException(
                f"`StreamedTraining`: a round has `steps_per_round={run.steps_per_round}` "
                f"times `num_iterations={run.num_iterations}` optimizer steps. Gradients of "
                "all but the first are of weights that are not there yet, and which groups the "
                "first has is known at the end of the round. Use 1 and 1."
            )
        if (why := run.learner.streaming_obstacle()) is not None:
            raise MisconfigurationException(f"`StreamedTraining`: {why}.")
        schedule.streaming = Streaming(self.start)
