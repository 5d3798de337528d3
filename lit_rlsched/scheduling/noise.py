"""Stateless random numbers: each is a function of a seed and a position."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers (Steele et al., 2014); equal on all platforms."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def counter_uniform(seeds: ArrayLike, counters: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1): number `counters[i]` of the stream with the seed `seeds[i]`.

    `engines.sampling.counter_uniform` computes the same on tensors.
    """
    seed, counter = (np.atleast_1d(np.asarray(x)).astype(np.uint64) for x in (seeds, counters))
    mixed = splitmix64(splitmix64(seed) + counter)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
