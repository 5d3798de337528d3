"""Infinite Sampling: how many completions decode at once, and in which order."""

from typing import Any

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.admission import Order, Refill, SlotSettings
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, LengthPredictor
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.settings import UsageError
from lit_rlsched.text import parse_bytes
from lit_rlsched.training.schedule import RunFacts, Schedule


class MicroGroupSampling(RolloutCallback):
    """Decode at most `slots` completions at once, whatever `num_generations` is.

    Micro sampling groups and continuous sampling (Infinite Sampling, arXiv 2506.22950). Without
    this callback up to 256 completions decode at once (vLLM on a GPU of 70 GiB or more: 1,024).

    Bias: none. The callback changes when a completion is drawn, never which tokens: log-probs are
    equal up to the engine's batch noise (5e-7 on vLLM in fp32). Several engines share `slots` and
    `memory_budget` equally.

    See `docs/explanation/infinite_sampling.md`.

    Args:
        slots: Maximum number of completions that decode at once (the paper's fixed slots). Refused
            if the engine's key-value cache cannot hold that many completions of full length.
        memory_budget: Alternative to `slots` (the paper's dynamic slots): key-value cache that all
            running completions may take together, such as `2GiB`. As many decode as fit at the
            moment, up to 256 (vLLM on a GPU of 70 GiB or more: 1,024).
        refill: `continuous` refills a slot as soon as it is free (continuous sampling); `rounds`
            waits until all are (naive micro sampling groups).
        order: Which completion goes next: `fifo` (default) or, by predicted length,
            `longest_first` (default with `LengthPrediction`), `shortest_first` (default where
            rounds end early) or `planned`.

    Raises:
        UsageError: an argument is out of range, or two contradict each other.

    Example::

        Trainer(callbacks=[MicroGroupSampling(slots=32), LengthPrediction()])
    """

    sets = "which completion decodes when"

    def __init__(
        self,
        slots: int | None = None,
        memory_budget: str | int | None = None,
        refill: Refill = "continuous",
        order: Order | None = None,
    ) -> None:
        if (slots is None) == (memory_budget is None):
            raise UsageError(
                f"`MicroGroupSampling(slots={slots}, memory_budget={memory_budget})`: give exactly "
                "one of the two."
            )
        if refill == "rounds" and order == "planned":
            raise UsageError(
                f"`MicroGroupSampling(refill='rounds', order={order!r})`: that order needs slots "
                "that are refilled one by one. Use `refill='continuous'`, or "
                "`order='longest_first'`, which sorts the micro groups."
            )
        budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
        self.settings = SlotSettings(slots, budget, refill, order)

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set how many completions decode at once."""
        schedule.slots = self.settings


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
