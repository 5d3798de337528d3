"""Speculation that changes nothing: fewer decode steps, the very same tokens."""

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.speculation import Drafting
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, Schedule

ROUNDS = 10
"""Rounds with `speculation/seconds_saved` after which a run is told if they are negative in all."""


class Speculation(RolloutCallback):
    """Draft several tokens of a completion and verify them in one decode step.

    While few completions run, the engine guesses the next tokens of each (*draft tokens*) from its
    own text, other completions of its prompt, and other prompts. It computes all positions in one
    pass and keeps the guesses up to the first that differs from its own draw. All guesses are
    judged by what is drawn in their place, and only those are computed that have been right often
    enough to save time. This pays in the tail of a round, with few slots and late in training.

    Bias: none in whole rounds. Every token and log-prob is the same as without this callback, up to
    the engine's batch noise. With `TailBatching`, `SortedBatching` and `DynamicSampling` text that
    repeats is in time more often: `speculation/trained_over_drawn_speed` is 1 without bias.

    See `docs/explanation/speculation.md`.

    Args:
        tokens: Maximum number of draft tokens of a completion in a decode step. 4 have most of the
            use of 8 and cost less where they are wrong.
        while_running: Guess only while at most this many completions run in an engine; guessing
            takes about 10 us a completion and step.
        drafter: Import path of a class of your own with the method `propose(text, siblings, most)`
            of `lit_rlsched.scheduling.drafters.Drafter`, which runs in the engine's process. What
            it raises or returns wrongly is counted in `speculation/drafter_failures`.

    Raises:
        UsageError: an argument is out of range, `drafter` cannot be imported, or the run uses
            `min_p` or completions that are too short.
        UsageError: the engine does not verify draft tokens.

    Example::

        Trainer(callbacks=[Speculation(), MicroGroupSampling(slots=16)])
    """

    sets = "how many tokens a decode step draws"

    def __init__(
        self, tokens: int = 4, while_running: int = 32, drafter: str | None = None
    ) -> None:
        self.settings = Drafting(tokens, while_running, drafter)
        self._saved: list[float] = []

    def describe(self) -> str:
        """Return the settings in words."""
        tokens, most = self.settings.tokens, self.settings.while_running
        return f"decode steps verify {tokens} draft tokens while at most {most} completions run"

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set how the engine drafts."""
        schedule.drafting = self.settings

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Warn once if the first rounds would have been faster without draft tokens."""
        saved = round.metrics.get("speculation/seconds_saved")
        if saved is None or len(self._saved) == ROUNDS:
            return
        self._saved.append(saved)
        if len(self._saved) == ROUNDS and (total := sum(self._saved)) < 0:
            rank_zero_warn(
                f"`Speculation` costs more than it saves: {ROUNDS} rounds took "
                f"{-total:.3g} s longer, by the times of their decode steps. Remove the callback "
                "until completions are more alike."
            )
