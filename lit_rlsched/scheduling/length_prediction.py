"""Predictors of completion lengths that learn from the run itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lit_rlsched.settings import RemembersInit
from lit_rlsched.types import Sample

BINS = 256
"""Bins of the length histogram, each 5 % wider than the last; the last one starts at 344,000."""


class LengthPredictor(RemembersInit, ABC):
    """Predicts how many tokens unfinished completions will still draw.

    Example::

        class PromptLength(LengthPredictor):
            def predict(self, samples):
                return [3.0 * len(sample.group.prompt.token_ids) for sample in samples]
    """

    revises: bool = False
    """Whether a finished completion changes the predictions for its unfinished siblings."""

    @abstractmethod
    def predict(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Predict the tokens to come of each completion, given those it has drawn.

        Predictions should lie between 1 and `max_completion_length` minus the drawn tokens.
        """

    def observe(self, samples: Sequence[Sample]) -> None:
        """Learn from finished completions."""

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        """Receive the function that decodes token ids, before the first `predict`."""

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

    A histogram holds the lengths of the run, with decaying weights. A prompt scales it by its own
    ratio: the decayed mean of its lengths relative to the run's mean at that time, shrunk towards 1
    while few are known. A completion of `d` tokens gets the mean residual life `E[L - d | L > d]`
    of the scaled histogram, or the maximum if no completion was ever that long.

    Memory: the histogram, and two numbers for each of the `max_prompts` prompts observed last.

    Args:
        decay: Weight of a prompt's completion relative to its next one.
        shrinkage: Number of completions of a prompt that weigh as much as the run's mean.
        half_life: Completions of the run after which one counts half.
        max_prompts: Maximum number of prompts to remember.
    """

    def __init__(
        self,
        decay: float = 0.9,
        shrinkage: float = 4.0,
        half_life: float = 2000.0,
        max_prompts: int = 100_000,
    ) -> None:
        self.decay, self.shrinkage = decay, shrinkage
        self.half_life, self.max_prompts = half_life, max_prompts
        self._histogram = np.zeros((2, BINS))  # weight, tokens
        self._prompts: dict[str, tuple[float, float]] = {}  # weight, weighted sum of ratios

    def ratio(self, uid: str) -> float:
        """Mean length of a prompt's completions over the run's mean; 1 for an unknown prompt."""
        if uid not in self._prompts:
            return 1.0
        weight, total = self._prompts[uid]
        return (total + self.shrinkage) / (weight + self.shrinkage)

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
        """Update the histogram, then the ratio of each prompt."""
        if not samples:
            return
        lengths = np.maximum(drawn(samples), 1.0)
        self._histogram *= 0.5 ** (len(samples) / self.half_life)
        bins = np.minimum(20 * np.log(lengths), BINS - 1).astype(int)
        np.add.at(self._histogram, (0, bins), 1.0)
        np.add.at(self._histogram, (1, bins), lengths)
        weight, tokens = self._histogram.sum(1)
        for sample, length in zip(samples, lengths.tolist(), strict=True):
            uid = sample.group.prompt.uid
            count, total = self._prompts.pop(uid, (0.0, 0.0))
            ratio = length * float(weight / tokens)
            self._prompts[uid] = (count * self.decay + 1.0, total * self.decay + ratio)
        while len(self._prompts) > self.max_prompts:
            del self._prompts[next(iter(self._prompts))]

    def state_dict(self) -> dict[str, Any]:
        """The histogram and the ratios; the prompts observed last come last."""
        ratios = np.array(list(self._prompts.values())).reshape(len(self._prompts), 2)
        return {
            "histogram": tensor(self._histogram),
            "uids": list(self._prompts),
            "ratios": tensor(ratios),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._histogram = state["histogram"].numpy().copy()
        ratios = [(weight, total) for weight, total in state["ratios"].tolist()]
        self._prompts = dict(zip(state["uids"], ratios, strict=True))


class SiblingMax(LengthPredictor):
    """Predicts that siblings become as long as the longest of them (Seer, arXiv 2511.14617).

    Once a completion of a group has finished, the others are predicted to reach the length of the
    group's longest completion; the longest itself gets the history's prediction. Before that, the
    first completion of each group is predicted to reach the limit, so that `longest_first` starts
    it first, as a probe; the others get the history's prediction. (Seer predicts the limit for all,
    but keeps probes in a queue of their own. In a single queue the siblings of one group would
    delay the probe of the next.)

    Args:
        history: Predicts while nothing is known of a group (default: `PromptHistory()`).
    """

    revises = True

    def __init__(self, history: PromptHistory | None = None) -> None:
        self.history = history or PromptHistory()

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        estimates = np.array(self.history.predict(samples))
        for i, sample in enumerate(samples):
            siblings = sample.group.completions
            have = sample.completion.drawn
            if any(c.finish_reason is not None for c in siblings):
                longest = max(c.drawn for c in siblings)
                estimates[i] = longest - have if longest > have else estimates[i]
            elif sample.completion.index == 0:
                estimates[i] = np.inf
        return within_limit(samples, estimates).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        self.history.observe(samples)

    def state_dict(self) -> dict[str, Any]:
        return self.history.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history.load_state_dict(state)
