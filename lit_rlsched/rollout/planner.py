"""Which prompts a round decodes: those that wait in the pool, and the next ones of the data."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from lit_rlsched.data.repetition import repeat
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.types import Group, Prompt, Sampling


class Drawn(Protocol):
    """A prompt that was drawn."""

    @property
    def prompt(self) -> Prompt:
        """Itself."""

    @property
    def key(self) -> str:
        """Names this visit to the prompt, and the group that is made of it."""


class Source(Protocol):
    """Where prompts come from, such as a `DomainSource`."""

    @property
    def domains(self) -> Collection[str | None]:
        """Of its prompts."""

    def draw(
        self, n: int, besides: Collection[str] = (), domain: str | None = None
    ) -> Sequence[Drawn]:
        """Take the next `n` prompts of a domain, but for those with these uids."""

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        """How many prompts of a domain can be drawn beside these."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class RoundPlanner:
    """Takes a round's groups from the front of the pool, and fills it from the data.

    What it gives are copies: a rollout cut short is drawn again as a whole, from the pool as it
    was.

    Args:
        pool: What waits.
        sampling: Of new groups.
        num_generations: Completions of a group that are trained on.
    """

    def __init__(self, pool: RolloutBuffer, sampling: Sampling, num_generations: int) -> None:
        self.pool = pool
        self.source: Source | None = None
        """Where the next prompts come from, once they are known."""
        self.sampling = sampling
        self.num_generations = num_generations

    def connect(self, source: Source) -> None:
        """Draw from `source`; one of the same domains goes on where it was."""
        if self.source is None or set(self.source.domains) != set(source.domains):
            self.source = source

    def plan(self, rule: RoundRule) -> list[Group]:
        """The groups of the next round."""
        for domain, n in rule.draws(list(self.pool)):
            self._draw(n, domain, rule)
        return [group.copy() for group in rule.plan(list(self.pool))]

    def replacement(self, group: Group, planned: Sequence[Group], rule: RoundRule) -> Group | None:
        """Another group for the same round; `None`: every prompt of its domain is in the pool.

        Args:
            group: In place of which.
            planned: The round's groups so far.
            rule: The round's.
        """
        # one that a round cut short had drawn, or the next of the data
        ids, late = {g.id for g in planned}, group.deferred > 0
        domain = rule.domain_of(group.prompt)
        for other in self.pool:
            fits = late or rule.domain_of(other.prompt) == domain
            if fits and other.id not in ids and (other.deferred > 0) == late:
                return other.copy()
        assert self.source is not None
        if not self.source.left(self._uids, domain):
            return None
        (drawn,) = self._draw(1, domain, rule)
        return drawn.copy()

    def _draw(self, n: int, domain: str | None, rule: RoundRule) -> list[Group]:
        """Take the next prompts of a domain that are not in the pool into it."""
        assert self.source is not None
        drawn = []
        for draw in self.source.draw(n, self._uids, domain):
            launched = rule.launched(self.num_generations)
            drawn.append(repeat(draw.prompt, launched, draw.key, self.sampling))
            self.pool.add(drawn[-1])
        return drawn

    @property
    def _uids(self) -> set[str]:
        return {group.prompt.uid for group in self.pool}

    def state_dict(self) -> dict[str, Any]:
        """The pool, and the position in the data."""
        source = None if self.source is None else self.source.state_dict()
        return {"source": source, "pool": self.pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore; `prompt` finds a prompt by its uid.

        Raises:
            ValueError: the position belongs to other prompts.
        """
        if state["source"] is not None:
            assert self.source is not None
            self.source.load_state_dict(state["source"])
        self.pool.load_state_dict(state["pool"], prompt)
