"""Which groups of a round become a micro-batch while others still decode."""

from collections.abc import Iterator, Sequence

from lit_rlsched.types import Group, Sample


class Parts:
    """Cuts the groups that a round will train on into parts, each as large as a micro-batch.

    RollPacker's stream trainer. The first part waits for the share `start` of an update's prompts.
    Parts depend only on the order in which groups are decoded, not on when scores arrive or how
    fast the trainer is, so that a repeated run is equal bit for bit.
    """

    def __init__(self, start: float, update_prompts: int, part_tokens: int) -> None:
        self._first = start * update_prompts
        self._part_tokens = part_tokens
        self._taken: set[str] = set()
        self._pending: list[Group] = []
        self._tokens = 0  # of `_pending`

    def ready(self, final_groups: Sequence[Group]) -> Iterator[list[Group]]:
        """Yield the parts that have become ready; more scores may arrive between two of them."""
        for group in final_groups:
            if group.id in self._taken:
                continue
            if not group.complete:
                return  # later groups may belong to its part
            self._taken.add(group.id)
            self._pending.append(group)
            self._tokens += sum(len(Sample(group, c)) for c in group.completions)
            if len(self._taken) >= self._first and self._tokens >= self._part_tokens:
                part, self._pending, self._tokens = self._pending, [], 0
                yield part
