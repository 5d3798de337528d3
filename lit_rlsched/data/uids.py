"""Uids of prompts: where each is, and a fingerprint of all."""

import hashlib
from bisect import bisect_left
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


class UidIndex:
    """Finds the position of a uid, with 8 bytes of memory for each.

    Args:
        uids: Different uids.
    """

    def __init__(self, uids: pa.StringArray) -> None:
        self._uids = uids
        self._order: NDArray[np.uint64] = pc.sort_indices(uids).to_numpy()
        self._find = lru_cache(1 << 16)(self._search)

    def __getitem__(self, uid: str) -> int:
        if (position := self._find(uid)) is None:
            raise KeyError(uid)
        return position

    def __contains__(self, uid: str) -> bool:
        return self._find(uid) is not None

    def _search(self, uid: str) -> int | None:
        def at(place: int) -> str:
            return self._uids[int(self._order[place])].as_py()

        place = bisect_left(range(len(self._order)), uid, key=at)
        if place == len(self._order) or at(place) != uid:
            return None
        return int(self._order[place])


def fingerprint(uids: pa.StringArray) -> str:
    """Number of uids, and `stable_hash` of them in their order."""
    content, separator = hashlib.blake2b(digest_size=8), ""
    for start in range(0, len(uids), 1000):
        content.update((separator + "\x1f".join(uids.slice(start, 1000).to_pylist())).encode())
        separator = "\x1f"
    return f"{len(uids)} prompts, {int.from_bytes(content.digest(), 'big') >> 1:016x}"
