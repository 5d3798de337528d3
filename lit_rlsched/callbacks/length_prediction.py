"""Infinite Sampling's length prediction: know early which completions become long."""

from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.lengths import LengthPredictor, TokenConditioned


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

    Args:
        predictor: By default `TokenConditioned()`, which learns from the run's own completions.
        probe_tokens: Tokens drawn of each completion before it is predicted; 0: predict from the
            prompt alone. Where completions have hundreds of tokens, 16 tell more than they delay;
            on the quick task, whose median is 51, 0 is better (`lit_rlsched.benchmark.steps`).

    Raises:
        ValueError: `probe_tokens` is negative, or as large as `max_completion_length`.

    Example::

        Trainer(callbacks=[MicroGroupSampling(slots=32), LengthPrediction()])
    """

    def __init__(self, predictor: LengthPredictor | None = None, probe_tokens: int = 16) -> None:
        if probe_tokens < 0:
            raise ValueError(f"`LengthPrediction(probe_tokens={probe_tokens})`: must be 0 or more.")
        self.predictor = CalibratedPredictor(predictor or TokenConditioned())
        self.probe_tokens = probe_tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the predictor to the data module, before it starts its engine."""
        datamodule = rollout_datamodule(trainer, self)
        datamodule.lengths = self.predictor
        datamodule.probe_tokens = self.probe_tokens

    def state_dict(self) -> dict[str, Any]:
        """What was learned: primitives and tensors only."""
        return self.predictor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.predictor.load_state_dict(state_dict)
