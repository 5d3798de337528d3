"""Calibration of a length predictor: measure its predictions, replace it where they are poor."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lit_rlsched.scheduling.length_prediction import (
    LengthPredictor,
    PromptHistory,
    SiblingMax,
    within_limit,
)
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.settings import UsageError
from lit_rlsched.text import three_digits
from lit_rlsched.types import Sample

HALF_LIFE = 4.0
"""Rounds after which the figures of a round count half."""
MARGIN = 0.05
"""A predictor whose rank correlation is this much below the history's is replaced."""
ERROR = 1.5
"""A predictor that ranks no better is replaced if its error is this many times the history's."""
MIN_OBSERVATIONS = 256
"""Finished completions that are needed before a predictor may be replaced."""


class CalibratedPredictor:
    """Uses a predictor as long as it is better than the prompts' history.

    For each completion and round, one prediction is compared with the tokens that followed: the
    first one, or the last one if the predictor revises (before a sibling has finished, such a
    predictor knows nothing).

    The history takes over if the predictor's rank correlation, on which the order of completions
    depends, is more than 0.05 below that of the history; or if it ranks no better and its mean
    error is more than 1.5 times as large. Both are averages over rounds (half-life 4 rounds,
    weighted by completions), after at least 256 completions. The predictor is still asked and
    taught, and takes over again once it is better. `Oracle` and `PromptHistory` are never replaced,
    nor is `SiblingMax`, which sends its probes ahead by predicting that they are long.
    """

    def __init__(self, predictor: LengthPredictor, history: PromptHistory | None = None) -> None:
        self.predictor = predictor
        self.history = history or PromptHistory()
        if self.history in (predictor, getattr(predictor, "history", None)):
            raise UsageError(
                "`history` is the predictor's own and would learn everything twice. "
                "Give another `PromptHistory`, or leave `history` out."
            )
        self.fallback = False
        """Whether the history answers in place of the predictor."""
        self.invalid = 0
        """Predictions that the history replaced: not positive numbers, or too few or too many."""
        self._asked: dict[str, tuple[int, float, float]] = {}
        self._finished: list[Sample] = []
        self._invalid = 0
        self._warned = False
        self._averages = np.zeros(5)  # weight; weighted sums of the four figures
        self._waits: dict[str, tuple[float, float]] = {}
        """Tokens drawn and decode steps waited for tools, by environment, with decaying weights."""
        self._observations = 0

    @property
    def revises(self) -> bool:
        """Whether predictions change when a sibling finishes."""
        return self.predictor.revises

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        self.predictor.bind(decode)

    def start_round(self) -> None:
        """Forget a round that was interrupted; it is drawn again."""
        self._asked.clear()
        self._finished.clear()
        self._invalid = 0

    def expect(self, samples: Sequence[Sample]) -> list[float]:
        """Predict the tokens to come of each completion, between 1 and the number it may draw."""
        if not samples:
            return []
        from_history = np.array(self.history.predict(samples))
        expected = within_limit(samples, self._valid(self.predictor.predict(samples), from_history))
        for sample, *pair in zip(samples, expected.tolist(), from_history.tolist(), strict=True):
            if self.revises or sample.id not in self._asked:
                self._asked[sample.id] = (sample.completion.drawn, pair[0], pair[1])
        return (from_history if self.fallback else expected).tolist()

    def waits(self, sample: Sample) -> float:
        """Predict for how many decode steps the tools of a completion run, for each of its tokens.

        It is the mean of earlier completions in the same environment.
        """
        tokens, waited = self._waits.get(_environment(sample), (1.0, 0.0))
        return waited / tokens

    def observe(self, samples: Sequence[Sample]) -> None:
        """Record finished completions; `end_round` learns from them."""
        self._finished.extend(samples)

    def end_round(self) -> dict[str, float]:
        """Teach predictor and history, and return the metrics that are defined for this round.

        Both learn in the order of the groups, whichever completion finished first.
        """
        finished = sorted(self._finished, key=lambda s: (s.group.id, s.completion.index))
        pairs = [pair for sample in finished if (pair := self._compare(sample))]
        self.invalid += self._invalid
        self.start_round()
        self._note_waits(finished)
        self.predictor.observe(finished)
        self.history.observe(finished)
        metrics = {"length_prediction/invalid": float(self.invalid)}
        if pairs:
            expected, from_history, remaining, have, capped = np.array(pairs).T
            for name, predicted in (("", expected), ("history_", from_history)):
                for key, value in _calibration(predicted, remaining, have, capped > 0).items():
                    metrics[f"length_prediction/{name}{key}"] = value
            self._average(len(pairs), metrics)
        metrics["length_prediction/fallback"] = float(self.fallback)
        return metrics

    def _note_waits(self, finished: Sequence[Sample]) -> None:
        fade = 0.5 ** (1 / HALF_LIFE)
        self._waits = {n: (t * fade, w * fade) for n, (t, w) in self._waits.items() if t > 1.0}
        for sample in finished:
            tokens, waited = self._waits.get(name := _environment(sample), (0.0, 0.0))
            completion = sample.completion
            self._waits[name] = tokens + completion.drawn, waited + completion.waited

    def _compare(self, sample: Sample) -> tuple[float, float, float, int, bool] | None:
        """What predictor and history predicted, what came, what was drawn before, if capped."""
        if (asked := self._asked.pop(sample.id, None)) is None:
            return None
        have, expected, from_history = asked
        remaining = sample.completion.drawn - have
        if remaining <= 0:
            return None  # the completion was restarted after the prediction
        capped = sample.completion.finish_reason == "length"
        return expected, from_history, float(remaining), have, capped

    def state_dict(self) -> dict[str, Any]:
        """State of predictor and history, and their averages; nothing of an unfinished round."""
        own = self.predictor.state_dict()
        _check_plain(f"{type(self.predictor).__name__}.state_dict()", own)
        return {
            "class": type(self.predictor).__name__,
            "predictor": own,
            "history": self.history.state_dict(),
            "averages": self._averages.tolist(),
            "waits": {name: [*pair] for name, pair in self._waits.items()},
            "observations": self._observations,
            "fallback": self.fallback,
            "invalid": self.invalid,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; warn and ignore it if it is that of another predictor class."""
        name = type(self.predictor).__name__
        if state["class"] != name:
            warnings.warn(
                f"The checkpoint holds the state of a `{state['class']}`, so that "
                f"`LengthPrediction(predictor={name}(...))` starts untrained.",
                stacklevel=2,
            )
            return
        self.predictor.load_state_dict(state["predictor"])
        self.history.load_state_dict(state["history"])
        self._averages = np.array(state["averages"])
        self._waits = {name: (pair[0], pair[1]) for name, pair in state.get("waits", {}).items()}
        self._observations = state["observations"]
        self.fallback, self.invalid = state["fallback"], state["invalid"]
        self.start_round()

    def _valid(self, predictions: Any, otherwise: np.ndarray) -> np.ndarray:
        """The predictions, with invalid ones replaced by the history's."""
        try:
            if _is_tensor(predictions):
                predictions = predictions.detach().double().cpu()
            values = np.array(predictions, dtype=float)
        except (TypeError, ValueError):
            values = np.zeros(0)
        if values.shape != otherwise.shape:
            values = np.full(len(otherwise), np.nan)
        wrong = np.isnan(values) | (values < 0)
        self._invalid += int(wrong.sum())
        if wrong.all() and not self._warned:
            self._warned = True
            warnings.warn(
                f"`{type(self.predictor).__name__}.predict` returned a "
                f"`{type(predictions).__name__}` without a single positive number for "
                f"{len(otherwise)} completions; the prompts' history is used instead. Return one "
                "number of tokens per completion.",
                stacklevel=2,
            )
        return np.where(wrong, otherwise, values)

    def _average(self, count: int, metrics: dict[str, float]) -> None:
        """Add a round's figures to the averages, and switch between predictor and history."""
        names = ("rank_correlation", "history_rank_correlation", "mae", "history_mae")
        figures = [metrics[f"length_prediction/{name}"] for name in names]
        self._averages *= 0.5 ** (1 / HALF_LIFE)
        self._averages += count * np.array([1.0, *figures])
        self._observations += count
        own, history, error, history_error = (self._averages[1:] / self._averages[0]).tolist()
        exempt = type(self.predictor) in (Oracle, PromptHistory, SiblingMax)
        if exempt or self._observations < MIN_OBSERVATIONS:
            return
        no_better = own < history + MARGIN
        worse = own < history - MARGIN or (no_better and error > ERROR * history_error)
        if self.fallback == (worse or (self.fallback and own <= history)):
            return
        self.fallback = not self.fallback
        warnings.warn(
            f"`LengthPrediction`: `{type(self.predictor).__name__}` "
            f"{'is replaced by the history of prompts' if self.fallback else 'is used again'}: its "
            f"rank correlation is {own:.3f} and its mean error {three_digits(error)} tokens; the "
            f"history has {history:.3f} and {three_digits(history_error)}.",
            stacklevel=3,
        )


def _calibration(
    predicted: np.ndarray, remaining: np.ndarray, have: np.ndarray, capped: np.ndarray
) -> dict[str, float]:
    """Error (tokens), rank correlation and coverage of capped completions; arguments `[N]`."""
    error = float(np.abs(predicted - remaining).mean())
    metrics = {"mae": error, "rank_correlation": 0.0}
    if len(np.unique(predicted)) > 1 and len(np.unique(remaining)) > 1:
        correlation = np.corrcoef(_ranks(predicted), _ranks(remaining))[0, 1]  # Spearman's
        metrics["rank_correlation"] = float(correlation)
    if capped.any():
        metrics["cap_coverage"] = _coverage(predicted + have, capped)
    return metrics


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks `[N]`; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends: np.ndarray = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]


def _coverage(predicted: np.ndarray, capped: np.ndarray) -> float:
    """R-precision: the share of the R capped completions among the R longest predicted.

    Of equal predictions at the border each counts in part, so that their order does not matter.
    """
    count = int(capped.sum())
    least = np.sort(predicted)[-count]
    above, equal = predicted > least, predicted == least
    places = count - int(above.sum())
    return float(capped[above].sum() + places * capped[equal].mean()) / count


def _environment(sample: Sample) -> str:
    return str(sample.group.prompt.columns.get("environment", ""))


def _is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _check_plain(name: str, state: Any) -> None:
    """Refuse objects that `torch.load(weights_only=True)` refuses, before they are saved."""
    if isinstance(state, dict):
        for key, value in state.items():
            _check_plain(f"{name}[{key!r}]", value)
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            _check_plain(f"{name}[{i}]", value)
    elif not (state is None or type(state) in (bool, int, float, str) or _is_tensor(state)):
        raise UsageError(
            f"`{name}` is a `{type(state).__name__}`, which cannot be loaded from a checkpoint. "
            "Use numbers, strings, tensors, and lists and dicts of them."
        )
