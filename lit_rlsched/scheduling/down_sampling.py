"""PODS: which completions of each group are trained on.

Policy Optimization with Down-Sampling (arXiv 2504.13818) draws and scores `n` completions per
prompt, and trains on `keep` of them. The rules here choose these by their rewards; the caller
computes advantages.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from lit_rlsched.settings import UsageError

Rule = Literal["max_variance", "max_reward", "percentile", "random"]

_ROUNDING = 1e-12  # variances that differ by less than this share of the largest count as equal


def max_variance(rewards: ArrayLike, keep: int) -> np.ndarray:
    """Choose the `keep` completions of each group whose rewards have the largest variance.

    These are the k highest and `keep - k` lowest rewards for some k (Lemma 3.1 of arXiv
    2504.13818), found in O(n log n). Ties: of several k the one nearest to `keep / 2`, then the
    smaller; of equal rewards the first ones, so that `0 .. keep - 1` is chosen if all are equal.
    """
    values = _check(rewards, keep)
    order, ordered, spare = _sort(values, keep)
    j = np.arange(keep)
    lowest, highest = ordered[..., :keep], np.take_along_axis(ordered, spare + j, axis=-1)
    # scale by a power of two, which is exact, so that squares do not overflow
    largest = np.maximum(np.abs(lowest[..., :1]), np.abs(highest[..., -1:]))
    exponent = -np.frexp(largest)[1]
    # deviations from one of the rewards are exact if rewards are close, however large
    middle = np.take_along_axis(ordered, (spare + keep) // 2, axis=-1)
    center = np.ldexp(middle, exponent)
    low = np.ldexp(lowest, exponent) - center
    high = (np.ldexp(highest, exponent) - center)[..., ::-1]

    k = np.arange(keep + 1)
    total = _sums(low)[..., ::-1] + _sums(high)  # of keep - k lowest and k highest
    squares = _sums(low**2)[..., ::-1] + _sums(high**2)
    variance = squares - total**2 / keep  # times keep
    equal = variance >= variance.max(axis=-1, keepdims=True) * (1 - _ROUNDING)
    far = np.where(equal, np.abs(2 * k - keep), keep + 1)
    highs = far.argmin(axis=-1)[..., None]  # any k will do if rewards are missing
    return _take(j + spare * (j >= keep - highs), order, ordered)


def max_reward(rewards: ArrayLike, keep: int) -> np.ndarray:
    """Choose the `keep` completions of each group with the highest rewards, first ones on ties.

    For shapes and errors see `max_variance`.
    """
    order, ordered, spare = _sort(_check(rewards, keep), keep)
    return _take(np.arange(keep) + spare, order, ordered)


def percentile(rewards: ArrayLike, keep: int) -> np.ndarray:
    """Choose the completions of each group at the quantiles `(i - 1/2) / keep`, i = 1 .. keep.

    Quantiles are those of the scored completions; of equal rewards the first are chosen. From an
    early version of arXiv 2504.13818. For shapes and errors see `max_variance`.
    """
    order, ordered, spare = _sort(_check(rewards, keep), keep)
    ranks = (2 * np.arange(keep) + 1) * (spare + keep) // (2 * keep)
    return _take(ranks, order, ordered)


def random(rewards: ArrayLike, keep: int, seed: Any = 0) -> np.ndarray:
    """Choose `keep` scored completions of each group uniformly at random.

    For shapes and errors see `max_variance`.
    """
    values = _check(rewards, keep)
    draws = np.random.default_rng(seed).random(values.shape)
    draws[np.isnan(values)] = np.nan  # sorts last
    order, ordered, _ = _sort(draws, keep)
    return _ascending(order[..., :keep], np.isnan(ordered[..., :keep]))


RULES: dict[Rule, Callable[..., np.ndarray]] = {
    "max_variance": max_variance,
    "max_reward": max_reward,
    "percentile": percentile,
    "random": random,
}


def _check(rewards: ArrayLike, keep: int) -> np.ndarray:
    """The rewards as float64, NaN where missing."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim not in (1, 2):
        raise UsageError(
            f"`rewards` has the shape {values.shape}: give one row per group, or one flat group."
        )
    n = values.shape[-1]
    if not 1 <= keep <= n:
        raise UsageError(f"`keep={keep}` of {n} rewards in a group: use 1 to {n}.")
    return np.where(np.isinf(values), np.nan, values)


def _sort(values: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort each group in ascending order, NaN last."""
    order = np.argsort(values, kind="stable")
    scored = np.count_nonzero(~np.isnan(values), axis=-1)[..., None]
    return order, np.take_along_axis(values, order, axis=-1), np.maximum(scored - keep, 0)


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, .. values: `[..., keep + 1]` from `[..., keep]`."""
    sums = np.cumsum(values, axis=-1)
    return np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)


def _take(ranks: np.ndarray, order: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Indices of the completions at ascending ranks, of equal rewards the first completions."""
    alike = _starts(ordered)  # first rank with the same reward
    first = np.take_along_axis(alike, ranks, axis=-1)
    ranks = first + np.arange(ranks.shape[-1]) - _starts(first)
    unscored = np.isnan(np.take_along_axis(ordered, ranks, axis=-1))
    return _ascending(np.take_along_axis(order, ranks, axis=-1), unscored)


def _starts(ordered: np.ndarray) -> np.ndarray:
    """For each place the first one with an equal value; NaN equals nothing."""
    new = np.ones(ordered.shape, bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return np.maximum.accumulate(np.where(new, np.arange(ordered.shape[-1]), 0), axis=-1)


def _ascending(indices: np.ndarray, unscored: np.ndarray) -> np.ndarray:
    last = np.iinfo(np.int64).max
    indices = np.sort(np.where(unscored, last, indices))
    return np.where(indices == last, -1, indices)


SPREAD = 1e-8
"""Standard deviation below which rewards count as equal, as in `frac_reward_zero_std`."""


def informative(rewards: ArrayLike) -> bool:
    """Whether these rewards differ, so that some completions get an advantage other than 0."""
    scored = np.asarray(rewards)
    scored = scored[~np.isnan(scored)]
    with np.errstate(over="ignore"):  # an infinite deviation counts as a spread
        return len(scored) > 1 and bool(scored.std(ddof=1) >= SPREAD)
