"""Numbers for a regression from token ids, without a vocabulary."""

from collections.abc import Sequence

import numpy as np

from lit_rlsched.rollout.types import Row


class HashedTokens:
    """Features `[N, size]` of prompt and first tokens, without a vocabulary.

    Signed hashing (Weinberger et al., arXiv 0902.2206) of single tokens and pairs of the prompt and
    of the completion, and of its last tokens with their place counted from the end.

    Args:
        size: Columns that all of them share.
    """

    last = 4

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, rows: Sequence[Row]) -> np.ndarray:
        """Hash the tokens of each row, the prompt of each group once."""
        prompts: dict[str, np.ndarray] = {}
        features = np.zeros((len(rows), self.size))
        for row, vector in zip(rows, features, strict=True):
            if row.group.id not in prompts:
                ids = np.array(row.group.prompt.token_ids, dtype=np.uint64)
                prompts[row.group.id] = np.zeros(self.size)
                scale = max(len(ids), 1) ** -0.5  # long prompts must not outweigh short ones
                self._add(prompts[row.group.id], 1, ids, scale)
                self._add(prompts[row.group.id], 2, _pairs(ids), scale)
            vector += prompts[row.group.id]
            ids = np.array(row.completion.token_ids, dtype=np.uint64)
            for salt, keys in ((3, ids), (4, _pairs(ids))):
                unique, counts = np.unique(keys, return_counts=True)
                self._add(vector, salt, unique, np.log1p(counts))
            for place, token in enumerate(ids[: -self.last - 1 : -1]):
                self._add(vector, 5 + place, token[None], 1.0)
        return features

    def _add(
        self, vector: np.ndarray, salt: int, keys: np.ndarray, values: np.ndarray | float
    ) -> None:
        bits = _mix(keys + _mix(np.array([salt], dtype=np.uint64)))
        signs = 1.0 - 2.0 * (bits >> np.uint64(63))
        np.add.at(vector, bits % np.uint64(self.size), signs * values)


def _pairs(ids: np.ndarray) -> np.ndarray:
    return _mix(ids[:-1]) + ids[1:]


def _mix(keys: np.ndarray) -> np.ndarray:
    """Spread 64-bit keys (the finalizer of SplitMix64): the same on every platform."""
    keys = (keys + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
