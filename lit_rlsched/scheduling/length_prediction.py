"""How many tokens a completion will still draw: predictors that learn from the run itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_rlsched.scheduling.hashed_tokens import HashedTokens
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
    caps = np.array(
        [sample.group.sampling.max_completion_length for sample in samples], dtype=float
    )
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
        caps = np.array(
            [sample.group.sampling.max_completion_length for sample in samples], dtype=float
        )
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


class TokenConditioned(LengthPredictor):
    """Learns what the prompt and the first tokens tell of the rest, from the run's own completions.

    Infinite Sampling's token-conditioned prediction (arXiv 2506.22950) without its pre-trained
    regressor, which would go stale as the policy moves: ridge regression of `log(tokens to come)`,
    solved in closed form, in which old completions count ever less. The prediction is
    `exp(x @ w)`, scaled so that its mean is the mean that came (smearing, after Duan, 1983).

    A completion is learned from as it was when it was last asked for; one that finished unasked
    teaches only the history. Before any was seen, the history's estimate stands in.

    Memory: the features of the `max_waiting` completions asked for last (float32) and one square
    matrix of `features`. What waits is not in the state: unfinished completions are asked for
    again after a resume.

    Args:
        encoder: Folder or hub name of a Hugging Face encoder whose mean-pooled last hidden state
            replaces the hashed tokens; `bind` must then be called before `predict`.
        features: Columns for the hashed tokens; ignored with an `encoder`.
        ridge: Penalty on the squared weights.
        half_life: Completions after which one counts half.
        history: Gives the prompt's ratio, a feature; a `PromptHistory()` unless given.
        max_waiting: Completions whose features are kept until they finish.

    Raises:
        ValueError: The encoder cannot be loaded, or a number is out of range.
    """

    def __init__(
        self,
        encoder: str | None = None,
        features: int = 512,
        ridge: float = 5.0,
        half_life: float = 4000.0,
        history: PromptHistory | None = None,
        max_waiting: int = 16_384,
    ) -> None:
        check_finite(locals())
        if features < 1 or ridge <= 0 or half_life <= 0 or max_waiting < 1:
            raise ValueError(
                f"got features={features}, ridge={ridge}, half_life={half_life}, "
                f"max_waiting={max_waiting}: they must be >= 1, > 0, > 0 and >= 1"
            )
        self.ridge, self.half_life, self.max_waiting = ridge, half_life, max_waiting
        self.history = history or PromptHistory()
        self._tokens: Any = HashedTokens(features)
        if encoder is not None:
            from lit_rlsched.scheduling.sample_encoder import SampleEncoder

            self._tokens = SampleEncoder(encoder)
        self.size = self._tokens.size + 7
        """Features in all; the last one is the constant 1."""
        self._gram = np.zeros((self.size, self.size))
        self._moment = np.zeros(self.size)
        self._came, self._predicted = 0.0, 0.0
        self._weights: np.ndarray | None = None
        self._waiting: dict[tuple[str, int], tuple[int, float, np.ndarray]] = {}

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        """Say how token ids become the text that the encoder reads."""
        if hasattr(self._tokens, "bind"):
            self._tokens.bind(decode)

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Expect what followed where prompt and first tokens were alike."""
        if not samples:
            return []
        x = np.concatenate([self._tokens(samples), self._scalars(samples)], axis=1)
        if self._gram[-1, -1]:
            raw = np.exp(np.clip(x @ self._solved(), 0.0, 20.0))
            expected = raw * (self._came / self._predicted)
        else:
            raw, expected = np.full(len(samples), np.nan), np.array(self.history.predict(samples))
        for sample, tokens, features in zip(
            samples, raw.tolist(), x.astype(np.float32), strict=True
        ):
            key = (sample.group.id, sample.completion.index)
            self._waiting.pop(key, None)  # so that it is the newest again
            self._waiting[key] = (len(sample.completion.token_ids), tokens, features.copy())
        while len(self._waiting) > self.max_waiting:
            del self._waiting[next(iter(self._waiting))]
        return within_limit(samples, expected).tolist()

    def observe(self, samples: Sequence[Sample]) -> None:
        """Pair each completion's features, as it was asked for, with what came after."""
        self.history.observe(samples)
        pairs = []
        for sample in samples:
            asked = self._waiting.pop((sample.group.id, sample.completion.index), None)
            # one that was drawn anew may be shorter than when it was asked for
            if asked is not None and len(sample.completion.token_ids) > asked[0]:
                pairs.append((len(sample.completion.token_ids) - asked[0], *asked[1:]))
        if not pairs:
            return
        came, raw = np.array([p[:2] for p in pairs], dtype=float).T
        x = np.stack([p[2] for p in pairs]).astype(float)
        keep = 0.5 ** (len(pairs) / self.half_life)
        self._gram = self._gram * keep + x.T @ x
        self._moment = self._moment * keep + x.T @ np.log(came)
        self._weights = None
        if np.isnan(raw).any():  # the first ones were not predicted: take how well they are fitted
            raw = np.where(np.isnan(raw), np.exp(np.clip(x @ self._solved(), 0.0, 20.0)), raw)
        self._came = self._came * keep + float(came.sum())
        self._predicted = self._predicted * keep + float(raw.sum())

    def state_dict(self) -> dict[str, Any]:
        """The regression and the history."""
        return {
            "gram": tensor(self._gram),
            "moment": tensor(self._moment),
            "came": self._came,
            "predicted": self._predicted,
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both.

        Raises:
            ValueError: The state was saved with another number of features.
        """
        if len(state["moment"]) != self.size:
            raise ValueError(
                f"this `TokenConditioned` has {self.size} features, the saved one "
                f"{len(state['moment'])}. Give the `features` and the `encoder` it was saved with."
            )
        self._gram, self._moment = state["gram"].numpy().copy(), state["moment"].numpy().copy()
        self._came, self._predicted = state["came"], state["predicted"]
        self._weights = None
        self._waiting.clear()
        self.history.load_state_dict(state["history"])

    def _scalars(self, samples: Sequence[Sample]) -> np.ndarray:
        """Log-probs, lengths, the prompt's history and a constant `[N, 7]`, each about 1."""
        x = np.zeros((len(samples), 7))
        for sample, vector in zip(samples, x, strict=True):
            logprobs = np.nan_to_num(sample.completion.logprobs, nan=0.0, neginf=-10.0).clip(-10, 0)
            if len(logprobs):
                vector[:3] = -logprobs.mean(), -logprobs[-8:].mean(), -logprobs.min() / 5
            vector[3] = np.log1p(len(sample.completion.token_ids)) / 5
            vector[4] = np.log1p(len(sample.group.prompt.token_ids)) / 5
            vector[5] = np.log(self.history.ratio(sample.group.prompt.uid))
            vector[6] = 1.0
        return x

    def _solved(self) -> np.ndarray:
        """Weights of the regression; the constant's is not held back."""
        if self._weights is None:
            penalty = np.full(self.size, self.ridge)
            penalty[-1] = 1e-6
            self._weights = np.linalg.solve(self._gram + np.diag(penalty), self._moment)
        return self._weights


class Oracle(LengthPredictor):
    """Knows the lengths: the bound that a predictor could reach, for simulations and tests.

    Args:
        trace: Lengths by request id (`<group id>/<index>`); or a Parquet or JSONL file with columns
            `request` and `tokens`, like the spans of a `RolloutTrace`; or the folder `traces/` of
            a run with `RolloutLogger(save_trace=True)`, whose completions a run with the same
            settings draws again.

    Raises:
        ValueError: The file does not say which request each length belongs to.
    """

    def __init__(self, trace: str | Path | Mapping[str, int]) -> None:
        if isinstance(trace, str | Path):
            from lit_rlsched.scheduling.recorded_lengths import (
                TraceLengths,  # reading needs pyarrow
            )

            if not Path(trace).exists():
                raise ValueError(
                    f"`Oracle(trace={str(trace)!r})`: there is no such file or folder."
                )
            recorded = TraceLengths(trace).lengths
        else:
            recorded = trace
        if not isinstance(recorded, Mapping) or not recorded:
            raise ValueError(
                f"`Oracle(trace={trace!r:.80})` does not say which request each length belongs to. "
                "Give lengths by request id, or a trace with a column `request`."
            )
        self.lengths = recorded

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        """Look the lengths up; NaN for a completion that is not in the trace."""
        totals = np.array([self.lengths.get(sample.id, np.nan) for sample in samples], dtype=float)
        return within_limit(samples, totals - drawn(samples)).tolist()
