"""Prompts of later rounds fill the slots that a round leaves free, and are verified."""

import math

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.rollout_window import WindowRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule

ROUNDS = 3
"""Rounds of prompts in flight by default: a fourth one gains little where none overtakes."""


class RolloutWindow(RolloutCallback):
    """Keep the slots filled with prompts of later rounds, and verify what they have when it is old.

    Three rounds of prompts are in flight. A round trains on the oldest `prompts_per_round` of them;
    while its last completions decode, the others use the slots that are free. When the next round
    begins, the trainer verifies every token of an older policy: it keeps the prefix that the newest
    policy would have drawn (block verification, arXiv 2403.10444), and the engine draws the rest.
    No token that is trained on is stale, and the engine need not decode beside the update.

    Bias: none with `overtake=0`, up to the difference between engine and trainer: the order of the
    data decides what is in an update. With more, a round takes the prompts that are ready first, so
    updates see short completions earlier than long ones
    (`rollout/trained_over_drawn_length`). Every prompt that was begun is trained on.

    See `docs/explanation/rollout_window.md`.

    Args:
        prompts_in_flight: Prompts that are begun and not trained on. By default three rounds of
            them, or as many as the data hold. As many completions decode as those of one round;
            `MicroGroupSampling(slots=...)` changes it.
        overtake: Rounds of later prompts that may be trained on before a prompt. 2 is faster than
            0, and biased.

    Raises:
        UsageError: an argument is out of range, tokens cannot be verified (the engine's log-probs
            are not those of the policy, the strategy shards it, sampling is truncated), or another
            callback cannot work with this one.

    A copy of the trainable weights that drew the tokens is kept in CPU memory and in checkpoints.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[RolloutWindow(), StreamedTraining()])
    """

    sets = "when a round ends"

    def __init__(self, prompts_in_flight: int | None = None, overtake: float = 0) -> None:
        self.prompts_in_flight, self.overtake = prompts_in_flight, overtake

    def describe(self) -> str:
        """Return the settings in words."""
        order = "in the order of the data"
        if self.overtake:
            order = f"the first that are ready; up to {self.overtake:g} rounds overtake a prompt"
        return f"free slots begin later prompts, which are verified; a round trains {order}"

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule."""
        size, prompts = facts.settings.prompts_per_round, self.prompts_in_flight
        if prompts is not None and prompts < size:
            raise UsageError(
                f"`RolloutWindow(prompts_in_flight={prompts})`: an update has {size} prompts. Use "
                f"{size} or more."
            )
        fewer, prompts = prompts is None, prompts or ROUNDS * size
        overtakes = math.floor(self.overtake * size)
        schedule.rule = WindowRound(size, prompts, overtakes, fewer=fewer)
        schedule.compares_logprobs["`RolloutWindow`"] = "drafts are verified by"
