"""DAPO's dynamic sampling: which prompts teach something."""

import numpy as np
from numpy.typing import ArrayLike

SPREAD = 1e-8
"""Standard deviation below which rewards count as equal, as in `frac_reward_zero_std`."""


def informative(rewards: ArrayLike) -> bool:
    """Whether completions with these rewards have an advantage over each other.

    Args:
        rewards: Of one prompt, `[G]`; NaN where there is none.
    """
    scored = np.asarray(rewards)
    scored = scored[~np.isnan(scored)]
    with np.errstate(over="ignore"):  # infinite is a spread as well
        return len(scored) > 1 and bool(scored.std(ddof=1) >= SPREAD)
