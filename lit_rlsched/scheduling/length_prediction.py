"""Predicted lengths of completions: the interface, a predictor, and how good predictions are."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_rlsched.scheduling.prompt_statistics import HALF_LIFE, PromptStatistics
from lit_rlsched.settings import RemembersInit, UsageError
from lit_rlsched.types import Sample

WAIT_HALF_LIFE = 4.0
"""Rounds after which the waits of a round for tools count half."""
BINS = 256
"""Bins of the length histogram, each 5 % wider than the last; the last one starts at 344,000."""


PLAIN = (type(None), bool, int, float, str)
"""Types that `torch.load(weights_only=True)` accepts, beside tensors."""


class LengthPredictor(RemembersInit, ABC):
    """Predicts how many tokens unfinished completions will still draw.

    A run sets `statistics`: what it knows of each prompt.

    Example::

        class PromptLength(LengthPredictor):
            def predict(self, samples):
                return [3.0 * len(sample.group.prompt.token_ids) for sample in samples]
    """

    statistics: PromptStatistics

    @abstractmethod
    def predict(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Predict the tokens to come of each completion, given those it has drawn.

        Predictions should lie between 1 and `max_completion_length` minus the drawn tokens.
        """

    def observe(self, samples: Sequence[Sample]) -> None:
        """Learn from finished completions."""

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints: primitives and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""


def drawn(samples: Sequence[Sample]) -> np.ndarray:
    """Number of drawn tokens of each completion, `[N]`."""
    return np.array([sample.completion.drawn for sample in samples])


def within_limit(samples: Sequence[Sample], tokens: np.ndarray) -> np.ndarray:
    """Clip predictions `[N]` to between 1 and the tokens that each completion may still draw."""
    caps = np.array([s.group.sampling.max_completion_length for s in samples])
    have = np.array([len(s.completion.token_ids) for s in samples])
    return np.clip(tokens, 1.0, np.maximum(caps - have, 1.0))


def tensor(values: np.ndarray) -> Any:
    """Convert to a tensor, which `torch.load(weights_only=True)` accepts, unlike an array."""
    import torch

    return torch.tensor(values)


class PromptHistory(LengthPredictor):
    """Predicts from the lengths of the run, and of earlier completions of the same prompt.

    A histogram holds the lengths of the run, with decaying weights. A prompt scales it by the
    `relative_length` in the run's statistics. A completion of `d` tokens gets the mean residual
    life `E[L - d | L > d]` of the scaled histogram, or the maximum if no completion was ever that
    long.

    Args:
        shrinkage: Number of completions of a prompt that weigh as much as the run's mean.
        half_life: Completions of the run after which one counts half.
    """

    def __init__(self, shrinkage: float = 4.0, half_life: float = HALF_LIFE) -> None:
        self.shrinkage, self.half_life = shrinkage, half_life
        self.statistics = PromptStatistics()
        self._histogram = np.zeros((2, BINS))  # weight, tokens

    def ratio(self, uid: str) -> float:
        """Mean length of a prompt's completions over the run's mean; 1 for an unknown prompt."""
        return self.statistics.relative_length(uid, self.shrinkage)

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        caps = np.array([s.group.sampling.max_completion_length for s in samples])
        weights, tokens = self._histogram[:, self._histogram[0] > 0]
        ratios = np.array([self.ratio(sample.group.prompt.uid) for sample in samples])
        lengths = ratios[:, None] * (tokens / weights)  # [N, bins in use]
        # a length of exactly `drawn` tokens may be rounded up
        alive = weights * (lengths > drawn(samples)[:, None] * (1 + 1e-9))
        seen = alive.sum(1)
        totals = (alive * np.minimum(lengths, caps[:, None])).sum(1)
        expected = np.where(seen > 0, totals / np.where(seen > 0, seen, 1.0), caps)
        return within_limit(samples, expected - drawn(samples)).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        """Update the histogram."""
        if not samples:
            return
        lengths = np.maximum(drawn(samples), 1.0)
        self._histogram *= 0.5 ** (len(samples) / self.half_life)
        bins = np.minimum(20 * np.log(lengths), BINS - 1).astype(int)
        np.add.at(self._histogram, (0, bins), 1.0)
        np.add.at(self._histogram, (1, bins), lengths)

    def state_dict(self) -> dict[str, Any]:
        return {"histogram": tensor(self._histogram)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._histogram = state["histogram"].numpy().copy()


class CalibratedPredictor:
    """A predictor, how good it is, and the history of prompts that answers where it is invalid.

    For each completion and round, the first prediction is compared with the tokens that followed.
    The history is measured beside it, so that the metrics say what the predictor adds.
    """

    def __init__(self, predictor: LengthPredictor) -> None:
        self.predictor = predictor
        self.history = PromptHistory()
        self.invalid = 0
        """Predictions that the history replaced: not positive numbers, or too few or too many."""
        self._asked: dict[str, tuple[int, float, float]] = {}
        self._finished: list[Sample] = []
        self._invalid = 0
        self._warned = False
        self._waits: dict[str, tuple[float, float]] = {}
        """Tokens drawn and decode steps waited for tools, by environment, with decaying weights."""
        self.connect(PromptStatistics())

    def connect(self, statistics: PromptStatistics) -> None:
        """Let predictor and history read what the run knows of each prompt."""
        self.statistics = statistics
        self.history.statistics = self.predictor.statistics = statistics

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
            self._asked.setdefault(sample.id, (sample.completion.drawn, pair[0], pair[1]))
        return expected.tolist()

    def _valid(self, predictions: Any, otherwise: np.ndarray) -> np.ndarray:
        """Return the predictions, with invalid ones replaced by the history's."""
        try:
            if hasattr(predictions, "detach"):  # a tensor
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
        pairs = []
        for sample in finished:
            have, expected, from_history = self._asked.pop(sample.id, (0, 0.0, 0.0))
            came = sample.completion.drawn - have
            if expected and came > 0:  # else it was not asked about, or was restarted since
                pairs.append((expected, from_history, came))
        self.invalid += self._invalid
        self.start_round()
        fade = 0.5 ** (1 / WAIT_HALF_LIFE)
        self._waits = {n: (t * fade, w * fade) for n, (t, w) in self._waits.items() if t > 1.0}
        for sample in finished:
            tokens, waited = self._waits.get(name := _environment(sample), (0.0, 0.0))
            completion = sample.completion
            self._waits[name] = tokens + completion.drawn, waited + completion.waited
        self.predictor.observe(finished)
        self.history.observe(finished)
        metrics = {"length_prediction/invalid": float(self.invalid)}
        if pairs:
            predicted, of_history, lengths = np.array(pairs).T
            for name, tokens in (("", predicted), ("history_", of_history)):
                metrics[f"length_prediction/{name}mae"] = float(np.abs(tokens - lengths).mean())
                metrics[f"length_prediction/{name}rank_correlation"] = _spearman(tokens, lengths)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of predictor and history; nothing of an unfinished round."""
        own = self.predictor.state_dict()
        _check_plain(f"{type(self.predictor).__name__}.state_dict()", own)
        return {
            "class": type(self.predictor).__name__,
            "predictor": own,
            "history": self.history.state_dict(),
            "waits": {name: [*pair] for name, pair in self._waits.items()},
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
        self._waits = {name: (pair[0], pair[1]) for name, pair in state["waits"].items()}
        self.invalid = state["invalid"]
        self.start_round()


def _spearman(predicted: np.ndarray, came: np.ndarray) -> float:
    """Rank correlation of `[N]` values; 0 if those of a side are all equal."""
    if min(len(np.unique(values)) for values in (predicted, came)) < 2:
        return 0.0
    ranks = []
    for values in (predicted, came):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends: np.ndarray = counts.cumsum()
        ranks.append((ends - (counts - 1) / 2)[inverse])  # equal values share their mean rank
    return float(np.corrcoef(np.stack(ranks))[0, 1])


def _environment(sample: Sample) -> str:
    return str(sample.group.prompt.columns.get("environment", ""))


def _check_plain(name: str, state: Any) -> None:
    """Refuse objects that `torch.load(weights_only=True)` refuses, before they are saved."""
    if isinstance(state, dict):
        for key, value in state.items():
            _check_plain(f"{name}[{key!r}]", value)
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            _check_plain(f"{name}[{i}]", value)
    elif type(state) not in PLAIN and not hasattr(state, "detach"):  # a tensor; no import of torch
        raise UsageError(
            f"`{name}` is a `{type(state).__name__}`, which cannot be loaded from a checkpoint. "
            "Use numbers, strings, tensors, and lists and dicts of them."
        )
