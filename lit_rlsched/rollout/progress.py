"""What of a round is decoded, for the round loop and for simulations of it."""

from bisect import insort
from collections.abc import Iterable, Sequence

from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.types import Completion, Group, Sample


class Progress:
    """Counts completions that need no more decoding, and ranks groups that have no others."""

    def __init__(self, groups: Sequence[Group], patient: bool) -> None:
        self.state = RoundState([], 0, patient=patient)
        self.undecoded: dict[str, int] = {}
        """Number of completions of each group that still decode."""
        self.decoded_at: dict[str, tuple[int, int]] = {}
        """Turn in which the last completion of a group was decoded, and the group's place."""
        self._places: dict[str, int] = {}
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        """Add a group to the round, in the last place."""
        self.state.planned.append(group)
        self.state.completions += len(group.completions)
        self.undecoded[group.id] = len(group.completions)
        self._places[group.id] = len(self._places)

    def count(self, sample: Sample, turn: int) -> None:
        """Record that a completion needs no more decoding."""
        state, completion, name = self.state, sample.completion, sample.group.id
        left = self.undecoded[name] = self.undecoded[name] - 1
        state.completions_decoded += 1
        if completion.finished:
            state.finished.setdefault(name, []).append(completion)
        if not left:
            self.decoded_at[name] = turn, self._places[name]
            insort(state.decoded, sample.group, key=lambda group: self.decoded_at[group.id])

    def sorted(self, samples: Iterable[Sample]) -> list[Sample]:
        """Sort completions by the place of their group, and in it."""
        return sorted(samples, key=lambda s: (self._places[s.group.id], s.completion.index))

    def keep(self, group: Group, kept: list[Completion]) -> None:
        """Take all completions but `kept` out of a group that was stopped."""
        chosen = {c.index for c in kept}
        others = [c for c in group.completions if c.index not in chosen]
        self.state.stopped.setdefault(group.id, []).extend(others)
        group.completions = kept
