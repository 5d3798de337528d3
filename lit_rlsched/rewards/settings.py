"""Checks of the reward scheduler's settings."""

import math
import os
from collections.abc import Sequence

from lit_rlsched.sizes import parse_bytes

MIN_MEMORY = 64 << 20
"""Bytes that a worker needs for what it is sent."""


def check_timeout(timeout: float) -> None:
    """Refuse a time that does not end, or ends at once.

    Raises:
        ValueError: names it.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"`timeout={timeout}` must be a positive number of seconds.")


def check_env_vars(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse variables that are not there.

    Raises:
        ValueError: names them.
    """
    if isinstance(names, str):
        raise ValueError(f"`reward_env_vars={names!r}`: give a list of names, such as `[{names}]`.")
    if missing := sorted(set(names) - os.environ.keys()):
        raise ValueError(
            f"`reward_env_vars={list(names)}`: {', '.join(missing)} not set in the trainer's "
            "environment. "
            "Set every variable that is listed, or leave it out."
        )
    return tuple(names)


def check_memory_limit(limit: str | int | None) -> int | None:
    """The limit in bytes.

    Raises:
        ValueError: it is no size, or less than a worker needs for what it is sent.
    """
    if limit is None:
        return None
    size = parse_bytes(limit, "memory_limit")
    if size < MIN_MEMORY:
        raise ValueError(f"`memory_limit={limit!r}`: use '64MiB' or more.")
    return size
