"""Infinite Sampling's length prediction: know early which completions become long."""

from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.length_prediction import LengthPredictor
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.settings import check_count


class LengthPrediction(RolloutCallback):
    """Predict how long completions become, for the `order` of `MicroGroupSampling`.

    Every completion of a round first draws `probe_tokens` tokens and pauses; what is left of each
    is predicted from its prompt and those tokens, and the long ones go on first (token-conditioned
    prediction, Infinite Sampling, arXiv 2506.22950). The tokens of the probe are kept, and a
    completion goes on after it as if it had not paused; what a pause costs, tokens of context
    computed again, is in `rollout/prefill_tokens`. Predictions change when a completion is drawn,
    never which.

    Each round logs how good they were: `length_prediction/mae` in tokens, `/rank_correlation`, and
    `/cap_coverage`, the share of the completions cut at the limit that were among the longest
    predicted. A predictor that ranks worse than the plain history of prompts is replaced by it
    until it is better again, with a warning and `length_prediction/fallback`.

    Predictors, in `lit_rlsched.scheduling`: `token_conditioned.TokenConditioned` for most runs;
    `length_prediction.SiblingMax` where the completions of a prompt are of like length;
    `length_prediction.PromptHistory` where prompts come again many times;
    `recorded_lengths.Oracle` to replay a recorded run; or a `LengthPredictor` of your own.

    Args:
        predictor: By default `TokenConditioned()`, which learns from the run's own completions.
        probe_tokens: Tokens drawn of each completion before it is predicted; 0: predict from the
            prompt alone. By default 16, less where `max_completion_length` is below 256; and none
            where all completions of a round decode at once. Where completions have hundreds of
            tokens, 16 tell more than they delay; on the quick task, whose median is 51, 0 is better
            (`python -m benchmarks run steps`).

    Raises:
        ValueError: `predictor` is none, keeps a state that a checkpoint cannot hold, or
            `probe_tokens` is negative or as large as `max_completion_length`.

    Example::

        Trainer(callbacks=[MicroGroupSampling(slots=32), LengthPrediction()])
    """

    sets = "what predicts lengths"

    def __init__(
        self, predictor: LengthPredictor | None = None, probe_tokens: int | None = None
    ) -> None:
        if predictor is not None and not isinstance(predictor, LengthPredictor):
            raise ValueError(
                f"`LengthPrediction(predictor={predictor!r})` is no `LengthPredictor`. Give an "
                "instance, such as `PromptHistory()`; one of your own inherits from "
                "`lit_rlsched.scheduling.length_prediction.LengthPredictor`."
            )
        if probe_tokens is not None:
            check_count("LengthPrediction", "probe_tokens", probe_tokens, 0)
        self.predictor = CalibratedPredictor(TokenConditioned() if predictor is None else predictor)
        self.probe_tokens = probe_tokens
        self._trains = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the predictor into the schedule."""
        schedule, _ = rollout_schedule(trainer, self)
        self.predictor.state_dict()  # refuses one that could not be saved, before anything is drawn
        schedule.lengths, schedule.probe_tokens = self.predictor, self.probe_tokens
        self._trains = stage == "fit"

    def state_dict(self) -> dict[str, Any]:
        """What was learned: primitives and tensors only."""
        return self.predictor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; validation and test predict nothing."""
        if self._trains:
            self.predictor.load_state_dict(state_dict)
