"""How good length predictions are, and what to do where they are not."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchmetrics.functional import mean_absolute_error, spearman_corrcoef

from lit_rlsched.rollout.types import Row
from lit_rlsched.scheduling.lengths import (
    LengthPredictor,
    Oracle,
    PromptHistory,
    SiblingMax,
    within_limit,
)

HALF_LIFE = 4.0
"""Rounds after which a round's rank correlation counts half."""
MARGIN = 0.05
"""By which a predictor's rank correlation must be below the history's to be replaced."""
MIN_OBSERVATIONS = 256
"""Predicted completions that must have finished before a predictor may be replaced."""


class CalibratedPredictor:
    """Asks a predictor, measures it, and falls back on the prompts' history where it does worse.

    Of each completion one prediction a round is compared with what came: the first, or the last of
    a predictor that revises, which before any sibling has finished has nothing to say.

    Rank correlation decides, for a schedule only needs the order: when its average over rounds
    (half-life 4 rounds, each weighted by its completions) is below that of the history by more than
    0.05, after at least 256 completions, the history answers until the predictor is better again.
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
        self._finished: list[Row] = []
        self._invalid = 0
        self._correlations = np.zeros(3)  # weight, weighted sums: the predictor's, the history's
        self._observations = 0

    @property
    def revises(self) -> bool:
        """Whether to ask again when a sibling has finished."""
        return self.predictor.revises

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        """Hand on how token ids become text, to a predictor that reads text."""
        if hasattr(self.predictor, "bind"):
            self.predictor.bind(decode)

    def start_round(self) -> None:
        """Forget what is left of a round that did not come to its end: it is drawn again."""
        self._asked.clear()
        self._pairs.clear()
        self._finished.clear()
        self._invalid = 0

    def expect(self, rows: Sequence[Row]) -> list[float]:
        """Tokens still to come of each completion, between 1 and what it may still draw."""
        if not rows:
            return []
        from_history = np.array(self.history.predict(rows))
        expected = within_limit(rows, self._valid(self.predictor.predict(rows), from_history))
        for row, *pair in zip(rows, expected.tolist(), from_history.tolist(), strict=True):
            key = (row.group.id, row.completion.index)
            if self.revises or key not in self._asked:
                self._asked[key] = (len(row.completion.token_ids), pair[0], pair[1])
        return (from_history if self.fallback else expected).tolist()

    def observe(self, rows: Sequence[Row]) -> None:
        """Note finished completions and how well they were predicted; `end_round` learns from them.

        Once a round and in an order of its own, so that what is learned does not depend on which
        finished first.
        """
        self._finished.extend(rows)
        for row in rows:
            key = (row.group.id, row.completion.index)
            if (asked := self._asked.pop(key, None)) is None:
                continue
            have, expected, from_history = asked
            remaining = len(row.completion.token_ids) - have
            if remaining > 0:  # else it was drawn anew since
                capped = row.completion.finish_reason == "length"
                self._pairs[key] = expected, from_history, float(remaining), have, capped

    def end_round(self) -> dict[str, float]:
        """Let both learn from the round; its metrics, without those that are undefined."""
        finished = sorted(self._finished, key=lambda row: (row.group.id, row.completion.index))
        pairs = [pair for _, pair in sorted(self._pairs.items())]
        self.invalid += self._invalid
        self.start_round()
        self.predictor.observe(finished)
        self.history.observe(finished)
        metrics = {"length_prediction/invalid": float(self.invalid)}
        if pairs:
            expected, from_history, remaining, have, capped = torch.tensor(
                pairs, dtype=torch.float64
            ).T
            for name, predicted in (("", expected), ("history_", from_history)):
                for key, value in _calibration(predicted, remaining, have, capped.bool()).items():
                    metrics[f"length_prediction/{name}{key}"] = value
            self._average(
                len(pairs),
                metrics["length_prediction/rank_correlation"],
                metrics["length_prediction/history_rank_correlation"],
            )
        metrics["length_prediction/fallback"] = float(self.fallback)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of predictor and history, and how they compare; not what a round has begun."""
        return {
            "class": type(self.predictor).__name__,
            "predictor": self.predictor.state_dict(),
            "history": self.history.state_dict(),
            "correlations": self._correlations.tolist(),
            "observations": self._observations,
            "fallback": self.fallback,
            "invalid": self.invalid,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it.

        Raises:
            ValueError: It was saved with a predictor of another class.
        """
        name = type(self.predictor).__name__
        if state["class"] != name:
            raise ValueError(
                f"the checkpoint holds the state of a `{state['class']}`, but the length predictor "
                f"is a `{name}`. Resume with `{state['class']}`."
            )
        self.predictor.load_state_dict(state["predictor"])
        self.history.load_state_dict(state["history"])
        self._correlations = np.array(state["correlations"])
        self._observations = state["observations"]
        self.fallback, self.invalid = state["fallback"], state["invalid"]
        self.start_round()

    def _valid(self, predictions: Sequence[float], otherwise: np.ndarray) -> np.ndarray:
        """The predictions, and the history's where they make no sense."""
        values = np.array(predictions, dtype=float)
        if values.shape != otherwise.shape:
            self._invalid += len(otherwise)
            return otherwise
        wrong = ~np.isfinite(values) | (values < 0)
        self._invalid += int(wrong.sum())
        return np.where(wrong, otherwise, values)

    def _average(self, count: int, own: float, history: float) -> None:
        """Add a round's correlations to the averages; change over if they say so."""
        self._correlations *= 0.5 ** (1 / HALF_LIFE)
        self._correlations += count * np.array([1.0, own, history])
        self._observations += count
        own, history = (self._correlations[1:] / self._correlations[0]).tolist()
        exempt = isinstance(self.predictor, Oracle | PromptHistory | SiblingMax)
        if exempt or self._observations < MIN_OBSERVATIONS:
            return
        figures = f"rank correlation {own:.3f}, that of the prompts' history {history:.3f}"
        name = type(self.predictor).__name__
        if not self.fallback and own < history - MARGIN:
            self.fallback = True
            warnings.warn(f"`{name}` is replaced by the history: {figures}.", stacklevel=3)
        elif self.fallback and own > history:
            self.fallback = False
            warnings.warn(f"`{name}` answers again: {figures}.", stacklevel=3)


def _calibration(
    predicted: torch.Tensor, remaining: torch.Tensor, have: torch.Tensor, capped: torch.Tensor
) -> dict[str, float]:
    """Error (tokens), rank correlation and coverage of capped completions; all arguments `[N]`."""
    metrics = {"mae": mean_absolute_error(predicted, remaining).item(), "rank_correlation": 0.0}
    if predicted.unique().numel() > 1 and remaining.unique().numel() > 1:
        metrics["rank_correlation"] = spearman_corrcoef(predicted, remaining).item()
    if capped.any():
        metrics["cap_coverage"] = _coverage(predicted + have, capped)
    return metrics


def _coverage(predicted: torch.Tensor, capped: torch.Tensor) -> float:
    """R-precision: of the R capped completions, the share among the R longest predicted.

    torchmetrics' lets the order of the data decide where predictions are equal, as they often are.
    """
    count = int(capped.sum())
    least = predicted.sort(descending=True).values[count - 1]
    above, equal = predicted > least, predicted == least
    places = count - int(above.sum())
    return (capped[above].sum() + places * capped[equal].double().mean()).item() / count
