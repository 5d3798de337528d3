"""Which prompts a round decodes: those in the pool, and the next ones of the data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from lit_rlsched.data.repetition import repeat
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.types import Completion, Group, Prompt, Sampling

if TYPE_CHECKING:
    from lit_rlsched.data.source import DomainSource


class RolloutBuffer:
    """The pool's groups by id, in the order they were drawn.

    A group enters when its prompt is drawn from the data and leaves when it is trained on or
    dropped. In between it survives rounds and checkpoints.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def add(self, group: Group) -> None:
        """Append a newly drawn group."""
        assert group.id not in self._groups, f"group {group.id} is already in the pool"
        self._groups[group.id] = group

    def settle(self, planned: Iterable[Group], left: Iterable[Group]) -> None:
        """Remove a round's `planned` groups, except those in `left`, which keep their places."""
        stay = {group.id: group for group in left}
        for group in planned:
            if group.id in stay:
                self._groups[group.id] = stay[group.id]
            else:
                del self._groups[group.id]

    @property
    def completions(self) -> list[Completion]:
        """All completions, group after group."""
        return [c for group in self for c in group.completions]

    @property
    def tokens(self) -> int:
        """Number of tokens drawn so far of all completions."""
        return sum(c.drawn for c in self.completions)

    def restart(self) -> int:
        """Reset every completion to its state before the first draw."""
        discarded = self.tokens
        for completion in self.completions:
            completion.restart()
            completion.attempts = 0
        return discarded

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors only, for `torch.load(weights_only=True)`."""
        from lit_rlsched.rollout.packing import pack  # imports torch; simulations run without it

        return pack(self)

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore the groups; `prompt` finds a prompt by its uid."""
        from lit_rlsched.rollout.packing import unpack

        self._groups = {group.id: group for group in unpack(state, prompt)}


class RoundPlanner:
    """Plans a round: takes groups from the front of the pool after filling it from the data.

    The planned groups are copies, so an interrupted rollout leaves the pool unchanged and can be
    drawn again as a whole.
    """

    def __init__(self, pool: RolloutBuffer, sampling: Sampling, num_generations: int) -> None:
        self.pool = pool
        self.source: DomainSource | None = None
        """Gives the next prompts; set by `connect` once they are tokenised."""
        self.sampling = sampling
        self.num_generations = num_generations

    def connect(self, source: "DomainSource") -> None:
        """Draw from `source`. A known source with the same domains keeps its position instead."""
        if self.source is None or set(self.source.domains) != set(source.domains):
            self.source = source

    def plan(self, rule: RoundRule, rounds: int | None = None) -> list[Group]:
        """Return the groups of the next round, with which training goes on for `rounds`."""
        for domain, n in rule.draws([*self.pool]):
            most = n if rounds is None else rule.reach(rounds) - len(self.pool)
            self._draw(max(0, min(n, most)), domain, rule)
        return [group.copy() for group in rule.plan([*self.pool])]

    def replacement(self, group: Group, planned: Sequence[Group], rule: RoundRule) -> Group | None:
        """Return another group for the same round, or `None` if its domain has no prompt left.

        A waiting group of the pool comes first (for a deferred group the next deferred one, then
        one that an interrupted round had drawn), then the next prompt of the data.
        """
        ids, late = {g.id for g in planned}, group.deferred > 0
        domain = rule.domain_of(group.prompt)
        waiting = [g for g in self.pool if g.id not in ids]
        deferred = [g for g in waiting if g.deferred] if late else []
        fresh = (g for g in waiting if not g.deferred and rule.domain_of(g.prompt) == domain)
        if (other := next(chain(deferred, fresh), None)) is not None:
            return other.copy()
        assert self.source is not None
        if not self.source.left(self._uids(), domain):
            return None
        (drawn,) = self._draw(1, domain, rule)
        return drawn.copy()

    def _draw(self, n: int, domain: str | None, rule: RoundRule) -> list[Group]:
        """Add the next `n` prompts of a domain that the pool does not have."""
        assert self.source is not None
        drawn = []
        for draw in self.source.draw(n, self._uids(), domain):
            launched = rule.launched(self.num_generations)
            drawn.append(repeat(draw.prompt, launched, draw.key, self.sampling))
            self.pool.add(drawn[-1])
        return drawn

    def _uids(self) -> set[str]:
        return {group.prompt.uid for group in self.pool}

    def state_dict(self) -> dict[str, Any]:
        """Return the pool and the position in the data."""
        source = None if self.source is None else self.source.state_dict()
        return {"source": source, "pool": self.pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore pool and position; `prompt` finds a prompt by its uid."""
        if state["source"] is not None:
            assert self.source is not None
            self.source.load_state_dict(state["source"])
        self.pool.load_state_dict(state["pool"], prompt)
