"""DAPO's dynamic sampling (arXiv 2503.14476): which prompts have a gradient."""

import numpy as np
from numpy.typing import ArrayLike

SPREAD = 1e-8
"""Standard deviation below which rewards count as equal, as in `frac_reward_zero_std`."""


def informative(rewards: ArrayLike) -> bool:
    """Whether these rewards differ, so that some completions get an advantage other than 0.

    Args:
        rewards: Of one group, `[G]`; NaN for a completion without a reward.
    """
    scored = np.asarray(rewards)
    scored = scored[~np.isnan(scored)]
    with np.errstate(over="ignore"):  # an infinite deviation counts as a spread
        return len(scored) > 1 and bool(scored.std(ddof=1) >= SPREAD)
