"""Repeat references to prompts, one for each completion, and find the groups again.

A public attempt at this repeated prompt strings, and two things went wrong there that this file and
its tests rule out. It repeated them interleaved (p0, p0, p1, p1) while the leave-one-out baseline
still reshaped for the tiled order (p0, p1, p0, p1), so that prompts were compared with each other's
completions. And it tokenised the copies again with a `max_length` nobody had set: the memory it
saved was the prompts it had cut. Here a prompt is tokenised once, never cut, and repeated as a
reference; `group_index` is the only way back to the `[P, G]` layout of the advantages.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

Order = Literal["interleave", "tile"]
"""`interleave`: p0, p0, ..., p1, p1, ... `tile`: p0, p1, ..., p0, p1, ..."""


def repeat_prompts(
    prompts: Sequence[T], num_generations: int, order: Order = "interleave"
) -> list[T]:
    """Repeat references to prompts, once for each completion; nothing is copied.

    Example:
        >>> repeat_prompts(["a", "b"], 2)
        ['a', 'a', 'b', 'b']
        >>> repeat_prompts(["a", "b"], 2, order="tile")
        ['a', 'b', 'a', 'b']
    """
    _check(num_generations, order)
    if order == "tile":
        return list(prompts) * num_generations
    return [prompt for prompt in prompts for _ in range(num_generations)]


def group_index(
    num_prompts: int, num_generations: int, order: Order = "interleave"
) -> NDArray[np.int64]:
    """Where each group's completions are in the repeated list, for the same order.

    Returns:
        `[P, G]`: `rewards[group_index(P, G, order)]` has one row per prompt, whichever the order.

    Example:
        >>> group_index(2, 3, order="tile").tolist()
        [[0, 2, 4], [1, 3, 5]]
    """
    _check(num_generations, order)
    positions = np.arange(num_prompts * num_generations, dtype=np.int64)
    if order == "tile":
        return positions.reshape(num_generations, num_prompts).T
    return positions.reshape(num_prompts, num_generations)


def _check(num_generations: int, order: Order) -> None:
    if num_generations < 2:
        raise ValueError(
            f"`num_generations={num_generations}`: a completion's baseline is the other "
            "completions of its prompt, so there must be at least 2. Use 2 or more."
        )
    if order not in ("interleave", "tile"):
        raise ValueError(f"`order={order!r}` is unknown. Use 'interleave' or 'tile'.")
