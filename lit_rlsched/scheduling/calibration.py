"""How good length predictions are, and what to do where they are not."""

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
from lit_rlsched.types import Sample

HALF_LIFE = 4.0
"""Rounds after which a round's rank correlation counts half."""
MARGIN = 0.05
"""By which a predictor's rank correlation must be below the history's to be replaced."""
ERROR = 1.5
"""Times the history's mean error that is too much where a predictor ranks no better."""
MIN_OBSERVATIONS = 256
"""Predicted completions that must have finished before a predictor may be replaced."""


class CalibratedPredictor:
    """Asks a predictor, measures it, and falls back on the prompts' history where it does worse.

    Of each completion one prediction a round is compared with what came: the first, or the last of
    a predictor that revises, which before any sibling has finished has nothing to say.

    Rank correlation decides, for a schedule needs the order: when its average over rounds
    (half-life 4 rounds, each weighted by its completions) is below that of the history by more than
    0.05, after at least 256 completions, the history answers until the predictor is better again;
    and so where it ranks no better and errs by half as much again.
    Meanwhile the predictor is still asked, and learns. Never replaced are an `Oracle`, a
    `PromptHistory`, and `SiblingMax`, whose probes go first on purpose and not because they are
    thought to be long.

    Args:
        predictor: What to ask. What it raises is not caught.
        history: What replaces it; a `PromptHistory()` unless given. It must not be the predictor's
            own, which would learn everything twice.
    """

    def __init__(self, predictor: LengthPredictor, history: PromptHistory | None = None) -> None:
        self.predictor = predictor
        self.history = history or PromptHistory()
        if self.history in (predictor, getattr(predictor, "history", None)):
            raise ValueError(
                "`history` is the predictor's own and would learn everything twice. "
                "Give another `PromptHistory`, or none."
            )
        self.fallback = False
        """Whether the history answers."""
        self.invalid = 0
        """Predictions that were no positive number, or came in the wrong number: replaced."""
        self._asked: dict[tuple[str, int], tuple[int, float, float]] = {}
        self._pairs: dict[tuple[str, int], tuple[float, float, float, int, bool]] = {}
        self._finished: list[Sample] = []
        self._invalid = 0
        self._warned = False
        self._averages = np.zeros(5)  # weight; weighted sums of correlations and errors
        self._observations = 0

    @property
    def revises(self) -> bool:
        """Whether to ask again when a sibling has finished."""
        return self.predictor.revises

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        """Hand on how token ids become text, to a predictor that reads text."""
        self.predictor.bind(decode)

    def start_round(self) -> None:
        """Forget what is left of a round that did not come to its end: it is drawn again."""
        self._asked.clear()
        self._pairs.clear()
        self._finished.clear()
        self._invalid = 0

    def expect(self, samples: Sequence[Sample]) -> list[float]:
        """Tokens still to come of each completion, between 1 and what it may still draw."""
        if not samples:
            return []
        from_history = np.array(self.history.predict(samples))
        expected = within_limit(samples, self._valid(self.predictor.predict(samples), from_history))
        for sample, *pair in zip(samples, expected.tolist(), from_history.tolist(), strict=True):
            key = (sample.group.id, sample.completion.index)
            if self.revises or key not in self._asked:
                self._asked[key] = (len(sample.completion.token_ids), pair[0], pair[1])
        return (from_history if self.fallback else expected).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        """Note finished completions and how well they were predicted; `end_round` learns from them.

        Once a round and in an order of its own, so that what is learned does not depend on which
        finished first.
        """
        self._finished.extend(samples)
        for sample in samples:
            key = (sample.group.id, sample.completion.index)
            if (asked := self._asked.pop(key, None)) is None:
                continue
            have, expected, from_history = asked
            remaining = len(sample.completion.token_ids) - have
            if remaining > 0:  # else it was drawn anew since
                capped = sample.completion.finish_reason == "length"
                self._pairs[key] = expected, from_history, float(remaining), have, capped

    def end_round(self) -> dict[str, float]:
        """Let both learn from the round; its metrics, without those that are undefined."""
        finished = sorted(
            self._finished, key=lambda sample: (sample.group.id, sample.completion.index)
        )
        pairs = [pair for _, pair in sorted(self._pairs.items())]
        self.invalid += self._invalid
        self.start_round()
        self.predictor.observe(finished)
        self.history.observe(finished)
        metrics = {"length_prediction/invalid": float(self.invalid)}
        if pairs:
            expected, from_history, remaining, have, capped = np.array(pairs, dtype=float).T
            for name, predicted in (("", expected), ("history_", from_history)):
                for key, value in _calibration(predicted, remaining, have, capped > 0).items():
                    metrics[f"length_prediction/{name}{key}"] = value
            self._average(len(pairs), metrics)
        metrics["length_prediction/fallback"] = float(self.fallback)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of predictor and history, and how they compare; not what a round has begun.

        Raises:
            ValueError: The predictor's own holds what a checkpoint could not be loaded with.
        """
        own = self.predictor.state_dict()
        _check_plain(f"{type(self.predictor).__name__}.state_dict()", own)
        return {
            "class": type(self.predictor).__name__,
            "predictor": own,
            "history": self.history.state_dict(),
            "averages": self._averages.tolist(),
            "observations": self._observations,
            "fallback": self.fallback,
            "invalid": self.invalid,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it; the state of another class is left alone, with a warning."""
        name = type(self.predictor).__name__
        if state["class"] != name:
            warnings.warn(
                f"The checkpoint holds what a `{state['class']}` learned, and "
                f"`LengthPrediction(predictor={name}(...))` learns anew.",
                stacklevel=2,
            )
            return
        self.predictor.load_state_dict(state["predictor"])
        self.history.load_state_dict(state["history"])
        self._averages = np.array(state["averages"])
        self._observations = state["observations"]
        self.fallback, self.invalid = state["fallback"], state["invalid"]
        self.start_round()

    def _valid(self, predictions: Any, otherwise: np.ndarray) -> np.ndarray:
        """The predictions, and the history's where they make no sense."""
        try:
            if _is_tensor(predictions):
                predictions = predictions.detach().double().cpu()
            values = np.array(predictions, dtype=float)
        except (TypeError, ValueError):
            values = np.empty(0)
        if values.shape != otherwise.shape:
            values = np.full(len(otherwise), np.nan)
        wrong = np.isnan(values) | (values < 0)
        self._invalid += int(wrong.sum())
        if wrong.all() and not self._warned:
            self._warned = True
            warnings.warn(
                f"`{type(self.predictor).__name__}.predict` returned a "
                f"`{type(predictions).__name__}` without a single positive number for "
                f"{len(otherwise)} completions: the prompts' history stands in. It should return "
                "one number of tokens for each.",
                stacklevel=2,
            )
        return np.where(wrong, otherwise, values)

    def _average(self, count: int, metrics: dict[str, float]) -> None:
        """Add a round's figures to the averages; change over if they say so."""
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
            f"{'is replaced by the history of prompts' if self.fallback else 'answers again'}: "
            f"rank correlation {own:.3f} and mean error {error:.3g} tokens, that history's "
            f"{history:.3f} and {history_error:.3g}.",
            stacklevel=3,
        )


def _calibration(
    predicted: np.ndarray, remaining: np.ndarray, have: np.ndarray, capped: np.ndarray
) -> dict[str, float]:
    """Error (tokens), rank correlation and coverage of capped completions; all arguments `[N]`."""
    error = float(np.abs(predicted - remaining).mean())
    metrics = {"mae": error, "rank_correlation": 0.0}
    if len(np.unique(predicted)) > 1 and len(np.unique(remaining)) > 1:
        correlation = np.corrcoef(_ranks(predicted), _ranks(remaining))[0, 1]  # Spearman's
        metrics["rank_correlation"] = float(correlation)
    if capped.any():
        metrics["cap_coverage"] = _coverage(predicted + have, capped)
    return metrics


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks `[N]`, where equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends: np.ndarray = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]


def _coverage(predicted: np.ndarray, capped: np.ndarray) -> float:
    """R-precision: of the R capped completions, the share among the R longest predicted.

    Where predictions are equal, as they often are, the order of the data decides nothing.
    """
    count = int(capped.sum())
    least = np.sort(predicted)[-count]
    above, equal = predicted > least, predicted == least
    places = count - int(above.sum())
    return float(capped[above].sum() + places * capped[equal].mean()) / count


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor; where torch was not imported, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _check_plain(name: str, state: Any) -> None:
    """Refuse what `torch.load(weights_only=True)` would: to find out on resuming is too late."""
    if isinstance(state, dict):
        for key, value in state.items():
            _check_plain(f"{name}[{key!r}]", value)
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            _check_plain(f"{name}[{i}]", value)
    elif not (state is None or type(state) in (bool, int, float, str) or _is_tensor(state)):
        raise ValueError(
            f"`{name}` is a `{type(state).__name__}`, which cannot be loaded from a checkpoint. "
            "Keep numbers, strings, tensors, and lists and dicts of them."
        )
