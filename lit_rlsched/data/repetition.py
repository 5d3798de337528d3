"""One prompt, many completions: a prompt is repeated as a reference, never as text or tokens.

`docs/explanation/repetition.md` follows a prompt from the data to the update.
"""

from collections.abc import Sequence

from lit_rlsched.types import Completion, Group, Prompt, Sampling


def repeat(prompt: Prompt, num_generations: int, key: str, sampling: Sampling) -> Group:
    """Create the group `key` of `num_generations` undrawn completions of one prompt."""
    return Group(key, prompt, sampling, [Completion(i) for i in range(num_generations)])


def places(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Row and column of every completion, group after group, in a matrix `[P, G]`.

    The row is the group's position in `groups`, the column the completion's `index`. Rewards and
    advantages get their `[P, G]` layout here only, so that it never depends on which completions of
    a group are present, nor on their order.
    """
    return [(row, c.index) for row, group in enumerate(groups) for c in group.completions]
