"""Features of token ids for a linear regression."""

from collections.abc import Sequence

import numpy as np

from lit_rlsched.scheduling.noise import splitmix64
from lit_rlsched.types import Sample


class HashedTokens:
    """Hashes the tokens of samples into features `[N, size]`, without a vocabulary.

    Signed feature hashing (Weinberger et al., arXiv 0902.2206) of the single tokens and the pairs
    of prompt and completion, and of the completion's last tokens with their distance from its end.

    Args:
        size: Number of features.
    """

    last = 4

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, samples: Sequence[Sample]) -> np.ndarray:
        """Hash the tokens of each sample; the prompt of each group only once."""
        groups = {sample.group.id: sample.group for sample in samples}
        at = {name: i for i, name in enumerate(groups)}
        ids, owners, _ = _flat([group.prompt.token_ids for group in groups.values()])
        # long prompts must not dominate
        scale = np.bincount(owners).clip(1) ** -0.5
        prompts = np.zeros((len(groups), self.size))
        self._add(prompts, owners, 1, ids, scale[owners])
        keys, pair_owners = _pairs(ids, owners)
        self._add(prompts, pair_owners, 2, keys, scale[pair_owners])
        features = prompts[[at[sample.group.id] for sample in samples]]

        ids, owners, from_end = _flat([sample.completion.token_ids for sample in samples])
        for salt, keys, places in ((3, ids, owners), (4, *_pairs(ids, owners))):
            keys, places, counts = _unique(keys, places)
            self._add(features, places, salt, keys, np.log1p(counts))
        late = from_end < self.last
        self._add(features, owners[late], 5 + from_end[late], ids[late], np.ones(late.sum()))
        return features

    def _add(
        self,
        features: np.ndarray,
        owners: np.ndarray,
        salt: int | np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Add each value to the feature of its owner that key and salt select."""
        bits = splitmix64(keys + splitmix64(np.atleast_1d(salt).astype(np.uint64)))
        signs = 1.0 - 2.0 * (bits >> np.uint64(63))
        columns = (bits % np.uint64(self.size)).astype(np.int64)
        np.add.at(features.ravel(), owners * self.size + columns, signs * values)


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


def _unique(keys: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each distinct key of an owner, the owners, and the number of occurrences."""
    order = np.lexsort((keys, owners))
    keys, owners = keys[order], owners[order]
    first = np.ones(len(keys), dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
    return keys[first], owners[first], np.diff(np.flatnonzero(first), append=len(keys))
