"""Infinite Sampling: length prediction from a prompt and the first tokens of a completion."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_rlsched.scheduling.length_prediction import (
    LengthPredictor,
    PromptHistory,
    tensor,
    within_limit,
)
from lit_rlsched.scheduling.noise import splitmix64
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Sample

LAST = 4
"""Last tokens of a completion that are features of their own."""


def hashed_tokens(samples: Sequence[Sample], size: int) -> np.ndarray:
    """Hash the tokens of samples into features `[N, size]`, without a vocabulary.

    Signed feature hashing (Weinberger et al., arXiv 0902.2206) of the single tokens and the pairs
    of prompt and completion, and of the completion's last tokens with their distance from its end.
    The prompt of each group is hashed once.
    """

    def add(
        features: np.ndarray, owners: np.ndarray, kind: Any, keys: np.ndarray, values: np.ndarray
    ) -> None:
        """Add each value to the feature of its owner that kind and key select."""
        bits = splitmix64(keys + splitmix64(np.atleast_1d(kind).astype(np.uint64)))
        signs = 1.0 - 2.0 * (bits >> np.uint64(63))
        columns = (bits % np.uint64(size)).astype(np.int64)
        np.add.at(features.ravel(), owners * size + columns, signs * values)

    groups = {sample.group.id: sample.group for sample in samples}
    at = {name: i for i, name in enumerate(groups)}
    ids, owners, _ = _flat([group.prompt.token_ids for group in groups.values()])
    scale = np.bincount(owners).clip(1) ** -0.5  # long prompts must not dominate
    prompts = np.zeros((len(groups), size))
    for kind, keys, places in ((1, ids, owners), (2, *_pairs(ids, owners))):
        add(prompts, places, kind, keys, scale[places])
    features = prompts[[at[sample.group.id] for sample in samples]]

    ids, owners, from_end = _flat([sample.completion.token_ids for sample in samples])
    for kind, keys, places in ((3, ids, owners), (4, *_pairs(ids, owners))):
        order = np.lexsort((keys, places))
        keys, places = keys[order], places[order]
        first = np.ones(len(keys), dtype=bool)  # of each distinct key of an owner
        first[1:] = (keys[1:] != keys[:-1]) | (places[1:] != places[:-1])
        counts = np.diff(np.flatnonzero(first), append=len(keys))
        add(features, places[first], kind, keys[first], np.log1p(counts))
    late = from_end < LAST
    add(features, owners[late], 5 + from_end[late], ids[late], np.ones(late.sum()))
    return features


def _flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All values, the index of each value's list, and its distance from that list's end."""
    sizes = np.array([len(values) for values in lists], dtype=np.int64)
    ids = np.fromiter((v for values in lists for v in values), np.uint64, int(sizes.sum()))
    ends = np.repeat(sizes.cumsum(), sizes)
    return ids, np.repeat(np.arange(len(lists)), sizes), ends - 1 - np.arange(len(ids))


def _pairs(ids: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A key for each pair of neighbours in one list, and the index of the list."""
    inside = owners[:-1] == owners[1:]
    return (splitmix64(ids[:-1]) + ids[1:])[inside], owners[1:][inside]


class TokenConditioned(LengthPredictor):
    """Predicts from the prompt with its first tokens, by regression on the run's own completions.

    Infinite Sampling's token-conditioned prediction (arXiv 2506.22950) without its pre-trained
    regressor, which would become outdated as the policy changes: a ridge regression of
    `log(tokens to come)` in closed form, with decaying weights. The prediction is `exp(x @ w)`,
    scaled so that its mean equals the mean of what came (smearing, after Duan, 1983).

    A completion is learned from in its state at the last `predict`. One that was never predicted
    teaches only the history, which also predicts until a first completion has finished.

    Memory: the features of the `max_waiting` completions predicted last (float32), and a square
    matrix. A checkpoint does not hold these features: after a resume, unfinished completions are
    predicted again.

    Args:
        features: Number of features of the hashed tokens.
        ridge: Penalty on the squared weights.
        half_life: Completions after which one counts half.
        max_waiting: Maximum number of unfinished completions whose features are kept.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        features: int = 512,
        ridge: float = 5.0,
        half_life: float = 4000.0,
        max_waiting: int = 16_384,
    ) -> None:
        self.ridge, self.half_life, self.max_waiting = ridge, half_life, max_waiting
        self.history = PromptHistory()
        self.features, self.size = features, features + 7
        """Number of all features, with the 7 of `_scalars`."""
        self._gram = np.zeros((self.size, self.size))
        self._moment = np.zeros(self.size)
        self._came, self._predicted = 0.0, 0.0
        self._weights: np.ndarray | None = None
        self._waiting: dict[str, tuple[int, float, np.ndarray]] = {}

    @property
    def statistics(self) -> PromptStatistics:
        """What the run knows of each prompt, which the history reads."""
        return self.history.statistics

    @statistics.setter
    def statistics(self, statistics: PromptStatistics) -> None:
        self.history.statistics = statistics

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        if not samples:
            return []
        x = np.concatenate([hashed_tokens(samples, self.features), self._scalars(samples)], axis=1)
        if self._gram[-1, -1]:
            raw = self._fitted(x)
            expected = raw * (self._came / self._predicted)
        else:
            raw, expected = np.full(len(samples), np.nan), np.array(self.history.predict(samples))
        for sample, tokens, features in zip(
            samples, raw.tolist(), x.astype(np.float32), strict=True
        ):
            self._waiting.pop(sample.id, None)  # move it to the end
            self._waiting[sample.id] = (sample.completion.drawn, tokens, features.copy())
        while len(self._waiting) > self.max_waiting:
            del self._waiting[next(iter(self._waiting))]
        return within_limit(samples, expected).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        """Learn from the tokens that followed the last prediction of each completion."""
        self.history.observe(samples)
        pairs = []
        for sample in samples:
            asked = self._waiting.pop(sample.id, None)
            # a restarted completion may be shorter than at its prediction
            if asked is not None and sample.completion.drawn > asked[0]:
                pairs.append((sample.completion.drawn - asked[0], *asked[1:]))
        if not pairs:
            return
        came, raw = np.array([p[:2] for p in pairs]).T
        x = np.stack([p[2] for p in pairs]).astype(float)
        keep = 0.5 ** (len(pairs) / self.half_life)
        self._gram = self._gram * keep + x.T @ x
        self._moment = self._moment * keep + x.T @ np.log(came)
        self._weights = None
        if np.isnan(raw).any():  # predicted by the history: use the fitted values
            raw = np.where(np.isnan(raw), self._fitted(x), raw)
        self._came = self._came * keep + float(came.sum())
        self._predicted = self._predicted * keep + float(raw.sum())

    def state_dict(self) -> dict[str, Any]:
        return {
            "gram": tensor(self._gram),
            "moment": tensor(self._moment),
            "came": self._came,
            "predicted": self._predicted,
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; refuse that of another number of features."""
        if len(state["moment"]) != self.size:
            raise UsageError(
                f"this `TokenConditioned` has {self.size} features, the saved one "
                f"{len(state['moment'])}. Use the `features` it was saved with."
            )
        self._gram, self._moment = state["gram"].numpy().copy(), state["moment"].numpy().copy()
        self._came, self._predicted = state["came"], state["predicted"]
        self._weights = None
        self._waiting.clear()
        self.history.load_state_dict(state["history"])

    def _scalars(self, samples: Sequence[Sample]) -> np.ndarray:
        """Log-probs, lengths, the prompt's ratio and a constant `[N, 7]`, each of size about 1."""
        x = np.zeros((len(samples), 7))
        for sample, vector in zip(samples, x, strict=True):
            logprobs = np.nan_to_num(sample.completion.logprobs).clip(-10, 0)
            if len(logprobs):
                vector[:3] = -logprobs.mean(), -logprobs[-8:].mean(), -logprobs.min() / 5
            vector[3] = np.log1p(len(sample.completion.token_ids)) / 5
            vector[4] = np.log1p(len(sample.group.prompt.token_ids)) / 5
            vector[5] = np.log(self.history.ratio(sample.group.prompt.uid))
            vector[6] = 1.0
        return x

    def _fitted(self, x: np.ndarray) -> np.ndarray:
        """The regression's values for features `[N, size]`, before smearing."""
        if self._weights is None:
            penalty = np.full(self.size, self.ridge)
            penalty[-1] = 1e-6  # the constant is not penalised
            self._weights = np.linalg.solve(self._gram + np.diag(penalty), self._moment)
        return np.exp(np.clip(x @ self._weights, 0.0, 20.0))
