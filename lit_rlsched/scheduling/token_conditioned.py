"""Infinite Sampling: length prediction from a prompt and the first tokens of a completion."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lit_rlsched.scheduling.hashed_tokens import HashedTokens
from lit_rlsched.scheduling.length_prediction import (
    LengthPredictor,
    PromptHistory,
    tensor,
    within_limit,
)
from lit_rlsched.settings import check_count, check_finite, check_range
from lit_rlsched.types import Sample


class TokenConditioned(LengthPredictor):
    """Predicts from the prompt with its first tokens, by regression on the run's own completions.

    Infinite Sampling's token-conditioned prediction (arXiv 2506.22950) without its pre-trained
    regressor, which would become outdated as the policy changes: a ridge regression of
    `log(tokens to come)` in closed form, with decaying weights. The prediction is `exp(x @ w)`,
    scaled so that its mean equals the mean of what came (smearing, after Duan, 1983).

    A completion is learned from in its state at the last `predict`. One that was never predicted
    teaches only the history, which also predicts until a first completion has finished.

    Memory: the features of the `max_waiting` completions predicted last (float32), and a square
    matrix. The former are not in the checkpoint: after a resume, unfinished completions are
    predicted again.

    Args:
        encoder: Folder or hub name of a Hugging Face encoder, whose mean-pooled last hidden state
            replaces the hashed tokens; `bind` must then be called before `predict`.
        features: Number of features of the hashed tokens; ignored with an `encoder`.
        ridge: Penalty on the squared weights.
        half_life: Completions after which one counts half.
        history: Gives the prompt's length ratio, a feature (default: `PromptHistory()`).
        max_waiting: Maximum number of unfinished completions whose features are kept.

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
        check_count("TokenConditioned", "features", features, 1)
        check_range("TokenConditioned", "ridge", ridge, ridge > 0, "more than 0")
        check_range("TokenConditioned", "half_life", half_life, half_life > 0, "more than 0")
        check_count("TokenConditioned", "max_waiting", max_waiting, 1)
        self.ridge, self.half_life, self.max_waiting = ridge, half_life, max_waiting
        self.history = history or PromptHistory()
        self._tokens: Any = HashedTokens(features)
        if encoder is not None:
            from lit_rlsched.scheduling.sample_encoder import SampleEncoder

            self._tokens = SampleEncoder(encoder)
        self.size = self._tokens.size + 7
        """Number of all features; the last one is the constant 1."""
        self._gram = np.zeros((self.size, self.size))
        self._moment = np.zeros(self.size)
        self._came, self._predicted = 0.0, 0.0
        self._weights: np.ndarray | None = None
        self._waiting: dict[str, tuple[int, float, np.ndarray]] = {}

    def bind(self, decode: Callable[[list[int]], str]) -> None:
        if hasattr(self._tokens, "bind"):
            self._tokens.bind(decode)

    def predict(self, samples: Sequence[Sample]) -> list[float]:
        if not samples:
            return []
        x = np.concatenate([self._tokens(samples), self._scalars(samples)], axis=1)
        if self._gram[-1, -1]:
            raw = self._fitted(x)
            expected = raw * (self._came / self._predicted)
        else:
            raw, expected = np.full(len(samples), np.nan), np.array(self.history.predict(samples))
        for sample, tokens, features in zip(
            samples, raw.tolist(), x.astype(np.float32), strict=True
        ):
            self._waiting.pop(sample.id, None)  # move it to the end
            self._waiting[sample.id] = (len(sample.completion.token_ids), tokens, features.copy())
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
            if asked is not None and len(sample.completion.token_ids) > asked[0]:
                pairs.append((len(sample.completion.token_ids) - asked[0], *asked[1:]))
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
        """Restore the state.

        Raises:
            ValueError: The state was saved with another number of features.
        """
        if len(state["moment"]) != self.size:
            raise ValueError(
                f"this `TokenConditioned` has {self.size} features, the saved one "
                f"{len(state['moment'])}. Use the `features` and the `encoder` it was saved with."
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
        return np.exp(np.clip(x @ self._solved(), 0.0, 20.0))

    def _solved(self) -> np.ndarray:
        """Weights of the regression; the constant is not penalised."""
        if self._weights is None:
            penalty = np.full(self.size, self.ridge)
            penalty[-1] = 1e-6
            self._weights = np.linalg.solve(self._gram + np.diag(penalty), self._moment)
        return self._weights
