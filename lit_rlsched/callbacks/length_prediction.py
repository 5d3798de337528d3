"""Infinite Sampling's length prediction: finds out early which completions become long."""

from typing import Any

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, LengthPredictor
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule


class LengthPrediction(RolloutCallback):
    """Predict completion lengths for the `order` of `MicroGroupSampling`.

    Token-conditioned prediction (Infinite Sampling, arXiv 2506.22950). Each completion first
    decodes `probe_tokens` tokens and pauses. The predictor estimates its length from the prompt and
    these tokens, and long completions resume first.

    Bias: none. Predictions change when a completion is drawn, never which tokens. `PromptHistory`
    answers where a predictor gives no positive number (`length_prediction/invalid`).

    See `docs/explanation/infinite_sampling.md`.

    Args:
        predictor: By default `TokenConditioned()`, which learns from the run's own completions.
            Others: `PromptHistory` in `lit_rlsched.scheduling.length_prediction`, `Oracle` in
            `recorded_lengths` beside it, or your own subclass of `LengthPredictor`.
        probe_tokens: Tokens decoded before a completion is predicted; 0 predicts from the prompt
            alone. By default 16, fewer if `max_completion_length` is below 256, and 0 if all
            completions of a round decode at once.

    Raises:
        UsageError: `predictor` is not a `LengthPredictor`, its state cannot be saved in a
            checkpoint, or `probe_tokens` is negative or not below `max_completion_length`.

    Example::

        Trainer(callbacks=[MicroGroupSampling(slots=32), LengthPrediction()])
    """

    sets = "what predicts lengths"

    def __init__(
        self, predictor: LengthPredictor | None = None, probe_tokens: int | None = None
    ) -> None:
        if predictor is not None and not isinstance(predictor, LengthPredictor):
            raise UsageError(
                f"`LengthPrediction(predictor={predictor!r})` is no `LengthPredictor`. Give an "
                "instance, such as `PromptHistory()`, or one of your own class that inherits from "
                "`lit_rlsched.scheduling.length_prediction.LengthPredictor`."
            )
        self.predictor = CalibratedPredictor(TokenConditioned() if predictor is None else predictor)
        self.probe_tokens = probe_tokens
        self._trains = True

    def describe(self) -> str:
        """Return the predictor's name in words."""
        return f"{type(self.predictor.predictor).__name__} predicts how long a completion will be"

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the predictor."""
        self.predictor.state_dict()  # raises early if the state cannot be saved
        schedule.lengths, schedule.probe_tokens = self.predictor, self.probe_tokens
        self._trains = facts.trains

    def state_dict(self) -> dict[str, Any]:
        """Return what the predictor has learned: primitives and tensors only."""
        return self.predictor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the predictor, unless the run only validates or tests."""
        if self._trains:
            self.predictor.load_state_dict(state_dict)
