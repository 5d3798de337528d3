"""Which completions of each group are trained on when more were drawn than that (PODS).

Policy Optimization with Down-Sampling (arXiv 2504.13818): draw `n` completions of a prompt, score
all, and train on the `keep` whose rewards say most. The rules here only choose; advantages are the
caller's.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

Rule = Literal["max_variance", "max_reward", "percentile", "random"]

_ROUNDING = 1e-12  # variances this close, as a share of the largest, are equal


def max_variance(rewards: ArrayLike, keep: int) -> np.ndarray:
    """The `keep` completions of each group whose rewards have the largest variance.

    Some k highest and `keep - k` lowest (Lemma 3.1 of arXiv 2504.13818), in O(n log n). Of several
    k with equal variance the one nearest to `keep / 2` is taken, and the smaller of two as near.
    Of equal rewards the first ones are taken, so that all alike gives `0 .. keep - 1`.

    Args:
        rewards: `[P, n]`, or `[n]` for one group. One that is NaN or infinite is no score.
        keep: How many of each group, from 1 to n.

    Returns:
        `[P, keep]` (or `[keep]`) int64 indices, ascending and distinct in each group; never that
        of one without a score: where fewer than `keep` have one, all these, then -1 to the end.

    Raises:
        ValueError: `rewards` has another number of dimensions, or `keep` is less than 1 or more
            than n.
    """
    values = _check(rewards, keep)
    order, ordered, spare = _sort(values, keep)
    j = np.arange(keep)
    lowest, highest = ordered[..., :keep], np.take_along_axis(ordered, spare + j, axis=-1)
    # powers of two are exact, and nothing overflows below 1
    largest = np.maximum(np.abs(lowest[..., :1]), np.abs(highest[..., -1:]))
    exponent = -np.frexp(largest)[1]
    # deviations from one of the rewards: exact where they are close to each other, however large
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
    highs = far.argmin(axis=-1)[..., None]  # with a NaN among them any k gives all that is scored
    return _take(j + spare * (j >= keep - highs), order, ordered)


def max_reward(rewards: ArrayLike, keep: int) -> np.ndarray:
    """The `keep` completions of each group with the highest rewards, of equal ones the first.

    Shapes and errors are those of `max_variance`.
    """
    order, ordered, spare = _sort(_check(rewards, keep), keep)
    return _take(np.arange(keep) + spare, order, ordered)


def percentile(rewards: ArrayLike, keep: int) -> np.ndarray:
    """The completions of each group at the `(i - 1/2) / keep` quantiles, i = 1 .. keep.

    Quantiles of the scored ones; of equal rewards the first are taken. From an early version of
    arXiv 2504.13818. Shapes and errors are those of `max_variance`.
    """
    order, ordered, spare = _sort(_check(rewards, keep), keep)
    ranks = (2 * np.arange(keep) + 1) * (spare + keep) // (2 * keep)
    return _take(ranks, order, ordered)


def random(rewards: ArrayLike, keep: int, seed: Any = 0) -> np.ndarray:
    """Any `keep` completions of each group, every set of scored ones as likely as another.

    Shapes and errors are those of `max_variance`.

    Args:
        rewards: As in `max_variance`; only which of them are scores matters.
        keep: How many of each group, from 1 to n.
        seed: What `np.random.default_rng` takes; a generator is advanced.
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
    """The rewards as float64, NaN where there is no score; nobody may write to it.

    It is perhaps the caller's own memory.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim not in (1, 2):
        raise ValueError(
            f"`rewards` has the shape {values.shape}: give a row for each group, or one flat group."
        )
    n = values.shape[-1]
    if not 1 <= keep <= n:
        raise ValueError(f"`keep={keep}` of {n} rewards in a group: use 1 to {n}.")
    infinite = np.isinf(values)
    return np.where(infinite, np.nan, values) if infinite.any() else values


def _sort(values: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices and values from the lowest to the highest, NaN last; how many scored to leave out.

    Returns:
        `[..., n]`, `[..., n]` and `[..., 1]`; 0 are left out where fewer than `keep` have a score.
    """
    order = np.argsort(values, axis=-1, kind="stable")
    scored = np.count_nonzero(~np.isnan(values), axis=-1)[..., None]
    return order, np.take_along_axis(values, order, axis=-1), np.maximum(scored - keep, 0)


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1 .. of them: `[..., keep + 1]` of `[..., keep]`."""
    sums = np.cumsum(values, axis=-1)
    return np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)


def _take(ranks: np.ndarray, order: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Indices of the completions at these ascending ranks, of equal rewards those of the first."""
    alike = _starts(ordered)  # the first rank with the same reward
    first = np.take_along_axis(alike, ranks, axis=-1)
    ranks = first + np.arange(ranks.shape[-1]) - _starts(first)
    unscored = np.isnan(np.take_along_axis(ordered, ranks, axis=-1))
    return _ascending(np.take_along_axis(order, ranks, axis=-1), unscored)


def _starts(ordered: np.ndarray) -> np.ndarray:
    """For each place the first one with the same value; a NaN is like no other."""
    new = np.ones(ordered.shape, bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return np.maximum.accumulate(np.where(new, np.arange(ordered.shape[-1]), 0), axis=-1)


def _ascending(indices: np.ndarray, unscored: np.ndarray) -> np.ndarray:
    last = np.iinfo(np.int64).max
    indices = np.sort(np.where(unscored, last, indices), axis=-1)
    return np.where(indices == last, -1, indices)
