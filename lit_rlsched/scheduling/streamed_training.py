"""RollPacker's stream trainer: which groups have their gradients computed together, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lit_rlsched.types import Group, Sample


@dataclass(frozen=True, slots=True)
class Streaming:
    """When gradients are computed during a round.

    Args:
        start: Share of the update's prompts that are ready before the first is.
    """

    start: float = 0.2


class Parts:
    """Cuts the groups that a round will train on into parts, each as large as a micro-batch.

    What is in a part follows from the order in which groups are decoded, not from when their scores
    arrive or how far the trainer has come: a run that is repeated is the same bit for bit.

    Args:
        streaming: When to begin.
        update_prompts: Prompts of the update.
        part_tokens: Tokens that a part has at least.
    """

    def __init__(self, streaming: Streaming, update_prompts: int, part_tokens: int) -> None:
        self._first = streaming.start * update_prompts
        self._part_tokens = part_tokens
        self._taken: set[str] = set()
        self._pending: list[Group] = []

    def ready(self, final_groups: Sequence[Group]) -> Iterator[list[Group]]:
        """The parts that have become ready; scores may come in between two of them.

        Args:
            final_groups: See `RoundRule.final_groups`.
        """
        for group in final_groups:
            if group.id in self._taken:
                continue
            if not group.complete:
                return  # the groups after it may share its part
            self._taken.add(group.id)
            self._pending.append(group)
            begins = len(self._taken) >= self._first
            if begins and _tokens(self._pending) >= self._part_tokens:
                part, self._pending = self._pending, []
                yield part


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(Sample(g, c)) for g in groups for c in g.completions)
