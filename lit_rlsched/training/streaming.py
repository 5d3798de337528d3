"""Which groups of a round become a micro-batch while others still decode."""

from collections.abc import Iterator, Sequence

from lit_rlsched.types import Group, Sample


class Parts:
    """Cuts the groups that a round will train on into parts.

    RollPacker's stream trainer. A part is the share `start` of an update's prompts, or a
    micro-batch if that is less; the first waits for the share. They depend only on the order of
    decoding, not on when scores arrive, so that a repeated run is equal bit for bit.
    """

    def __init__(self, start: float, update_prompts: int, part_tokens: int) -> None:
        self._share, self._part_tokens = start * update_prompts, part_tokens
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
            full = self._tokens >= self._part_tokens or len(self._pending) >= self._share
            if full and len(self._taken) >= self._share:
                part, self._pending, self._tokens = self._pending, [], 0
                yield part
