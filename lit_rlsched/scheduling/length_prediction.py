"""How many tokens a completion will still draw: predictors that learn from the run itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lit_rlsched.settings import check_finite
from lit_rlsched.types import Sample

BINS = 256
"""Of the histogram of lengths; each is 5 % wider than the last, so the last begins at 344,000."""


class LengthPredictor(ABC):
    """Predicts how long unfinished completions go on. All lengths are in tokens.

    Example::

        class PromptLength(LengthPredictor):
            def predict(self, samples):
                return [3.0 * len(sample.group.prompt.token_ids) for sample in samples]
    """

    revises: bool = False
    """Whether a finished completion changes what is predicted for its unfinished siblings in the
    same round."""

    @abstractmethod
    def predict(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Tokens still to come of each completion, given what it has drawn so far.

        Each should lie between 1 and `max_completion_length` minus what was drawn.
        """

    def observe(self, samples: Sequence[Sample]) -> None:  # noqa: B027
        """Learn from finished completions."""

    def bind(self, decode: Callable[[list[int]], str]) -> None:  # noqa: B027
        """Learn how token ids become text, before the first `predict`."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, in primitives and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what was learned."""


def drawn(samples: Sequence[Sample]) -> np.ndarray:
    """Tokens each completion has, `[N]`."""
    return np.array([len(sample.completion.token_ids) for sample in samples], dtype=float)


def within_limit(samples: Sequence[Sample], tokens: np.ndarray) -> np.ndarray:
    """Predictions `[N]` held between 1 and what each completion may still draw."""
    caps = np.array([s.group.sampling.max_completion_length for s in samples], dtype=float)
    return np.clip(tokens, 1.0, np.maximum(caps - drawn(samples), 1.0))


def tensor(values: np.ndarray) -> Any:
    """A tensor, which `torch.load(weights_only=True)` takes; torch is imported for it alone."""
    import torch

    return torch.tensor(values)


class PromptHistory(LengthPredictor):
    """What the run's lengths, and earlier completions of the same prompt, let expect.

    The run's lengths are kept as a histogram, in which old ones count ever less. A prompt scales it
    by its own ratio: the decayed mean of its lengths over the run's mean at that time, shrunk
    towards 1 where few were seen. Of a completion that has drawn `d` tokens, what is expected is
    the mean residual life `E[L - d | L > d]` of the scaled histogram; where nothing as long was
    ever seen, it is all that may still come.

    Memory: two numbers a prompt, for the `max_prompts` observed last, and a fixed histogram.

    Args:
        decay: Weight of a prompt's completion relative to the one seen after it.
        shrinkage: Completions of a prompt that count as much as the run's mean.
        half_life: Completions of the run after which one counts half.
        max_prompts: Prompts remembered.
    """

    def __init__(
        self,
        decay: float = 0.9,
        shrinkage: float = 4.0,
        half_life: float = 2000.0,
        max_prompts: int = 100_000,
    ) -> None:
        check_finite(locals())
        if not 0 < decay <= 1 or shrinkage < 0 or half_life <= 0 or max_prompts < 1:
            raise ValueError(
                f"got decay={decay}, shrinkage={shrinkage}, half_life={half_life}, "
                f"max_prompts={max_prompts}: they must be in (0, 1], >= 0, > 0 and >= 1"
            )
        self.decay, self.shrinkage = decay, shrinkage
        self.half_life, self.max_prompts = half_life, max_prompts
        self._histogram = np.zeros((2, BINS))  # weight, tokens
        self._prompts: dict[str, tuple[float, float]] = {}  # weight, weighted sum of ratios

    def ratio(self, uid: str) -> float:
        """Length of a prompt's completions over the run's mean; 1 for an unseen prompt."""
        weight, total = self._prompts.get(uid, (0.0, 0.0))
        return (total + self.shrinkage) / (weight + self.shrinkage) if weight else 1.0

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Expect the mean residual life."""
        caps = np.array([s.group.sampling.max_completion_length for s in samples], dtype=float)
        weights, tokens = self._histogram[:, self._histogram[0] > 0]
        ratios = np.array([self.ratio(sample.group.prompt.uid) for sample in samples])
        lengths = ratios[:, None] * (tokens / weights)  # [N, bins in use]
        alive = weights * (lengths > drawn(samples)[:, None])
        seen = alive.sum(1)
        totals = (alive * np.minimum(lengths, caps[:, None])).sum(1)
        expected = np.where(seen > 0, totals / np.where(seen > 0, seen, 1.0), caps)
        return within_limit(samples, expected - drawn(samples)).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        """Add to the histogram, then to each prompt its lengths over the run's mean."""
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
        """The histogram, and the prompts in the order in which they would be forgotten."""
        ratios = np.array(list(self._prompts.values()), dtype=float).reshape(-1, 2)
        return {
            "histogram": tensor(self._histogram),
            "uids": list(self._prompts),
            "ratios": tensor(ratios),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both."""
        self._histogram = state["histogram"].numpy().copy()
        ratios = [(weight, total) for weight, total in state["ratios"].tolist()]
        self._prompts = dict(zip(state["uids"], ratios, strict=True))


class SiblingMax(LengthPredictor):
    """As long as the longest sibling: Seer's estimate from within the round (arXiv 2511.14617).

    As soon as one completion of a group has finished, the others are expected to reach the longest
    that the group has, finished or not; one that is the longest itself gets the history's residual
    life. Until then the group's first completion counts as long as allowed, so that longest-first
    lets it go ahead and probe. The others get the history's estimate: Seer also gives them the
    limit, but keeps its probes in a queue of their own, and in a single queue the siblings of one
    group would then delay the probe of the next.

    Args:
        history: What is expected of a group of which nothing is known yet; a `PromptHistory()`
            unless given.
    """

    revises = True

    def __init__(self, history: PromptHistory | None = None) -> None:
        self.history = history or PromptHistory()

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Expect what the longest sibling has more."""
        estimates = np.array(self.history.predict(samples))
        for i, sample in enumerate(samples):
            siblings = sample.group.completions
            have = len(sample.completion.token_ids)
            if any(c.finish_reason is not None for c in siblings):
                longest = max(len(c.token_ids) for c in siblings)
                estimates[i] = longest - have if longest > have else estimates[i]
            elif sample.completion.index == 0:
                estimates[i] = np.inf
        return within_limit(samples, estimates).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        """Learn what to expect of the next groups."""
        self.history.observe(samples)

    def state_dict(self) -> dict[str, Any]:
        """The history's."""
        return self.history.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the history."""
        self.history.load_state_dict(state)
