"""The prompts between two rounds: those that were begun, and the next ones of the data."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from lit_rlsched.data.repetition import repeat
from lit_rlsched.rollout.result import PoolAudit, RoundResult
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.types import Completion, Group, Prompt, Sampling

if TYPE_CHECKING:
    from lit_rlsched.data.source import DomainSource
    from lit_rlsched.scheduling.prompt_choice import Chooser


class Pool:
    """Groups that were drawn from the data and not yet trained on, in the order they were drawn.

    `plan` fills the pool from the data, and returns copies of the groups that a round decodes. They
    stay in the pool as they were, so that a round that is interrupted is drawn again as a whole.
    `commit` removes what is trained on, and keeps what the others have drawn.
    """

    def __init__(self, sampling: Sampling, num_generations: int, source: Any = None) -> None:
        self.sampling, self.num_generations = sampling, num_generations
        self.source: DomainSource | None = source
        """Gives the next prompts; set by `connect` once they are tokenised."""
        self.chooser: Chooser | None = None
        """Chooses among them: `PromptChoice`."""
        self.runs = 0
        """Number of Trainers before this one."""
        self._groups: dict[str, Group] = {}
        self._audit = PoolAudit()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def completions(self) -> list[Completion]:
        """All completions, group after group."""
        return [c for group in self for c in group.completions]

    @property
    def tokens(self) -> int:
        """Number of tokens drawn so far of all completions."""
        return sum(c.drawn for c in self.completions)

    @property
    def seed_domain(self) -> str:
        """Part of every seed, so that a second Trainer draws other noise."""
        return f"run {self.runs}" if self.runs else ""

    def connect(self, source: "DomainSource") -> None:
        """Draw from `source`. A known source with the same domains keeps its position instead."""
        if self.source is None or set(self.source.domains) != set(source.domains):
            self.source = source

    def plan(self, rule: RoundRule, rounds: int | None = None) -> list[Group]:
        """Return the groups of the next round, with which training goes on for `rounds`."""
        for domain, n in rule.draws([*self]):
            most = n if rounds is None else rule.reach(rounds) - len(self)
            self._draw(max(0, min(n, most)), domain, rule)
        return [group.copy() for group in rule.plan([*self])]

    def replacement(self, group: Group, planned: Sequence[Group], rule: RoundRule) -> Group | None:
        """Return another group for the same round, or `None` if its domain has no prompt left.

        A waiting group of the pool comes first (for a deferred group the next deferred one, then
        one that an interrupted round had drawn), then the next prompt of the data.
        """
        ids, late = {g.id for g in planned}, group.deferred > 0
        domain = rule.domain_of(group.prompt)
        waiting = [g for g in self if g.id not in ids]
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
        for draw in self.source.draw(n, self._uids(), domain, self.chooser):
            launched = rule.launched(self.num_generations)
            drawn.append(repeat(draw.prompt, launched, draw.key, self.sampling))
            self.add(drawn[-1])
        return drawn

    def _uids(self) -> set[str]:
        return {group.prompt.uid for group in self}

    def add(self, group: Group) -> None:
        """Append a newly drawn group."""
        assert group.id not in self._groups, f"group {group.id} is already in the pool"
        self._groups[group.id] = group

    def commit(self, result: RoundResult, rule: RoundRule) -> dict[str, float]:
        """Remove the groups of a round, except those that stay: they keep their places.

        Return `pool/*` metrics.
        """
        stay = {group.id: group for group in result.left}
        for group in result.planned:
            if group.id in stay:
                self._groups[group.id] = stay[group.id]
            else:
                del self._groups[group.id]
        self._audit.add(result)
        left = [*self]
        metrics: dict[str, float] = {"rollout/pool_prompts": len(left)}
        if rule.ends_cycle(result.planned, left):
            metrics |= self._audit.metrics()
            self._audit = PoolAudit(carried_tokens=self.tokens)
        return metrics

    def leave_run(self) -> int:
        """Begin every completion anew for another Trainer, whose policy versions begin at 0.

        Return the number of tokens that are discarded.
        """
        self._audit = PoolAudit()
        self.runs += 1  # the noise that decided what is left in the pool must not come again
        discarded = self.tokens
        for completion in self.completions:
            completion.restart()
            completion.attempts = 0
        return discarded

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors only, for `torch.load(weights_only=True)`."""
        from lit_rlsched.rollout.packing import pack  # imports torch; simulations run without it

        source = None if self.source is None else self.source.state_dict()
        audit = self._audit.state_dict()
        return {"source": source, "pool": pack(self), "audit": audit, "runs": self.runs}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore pool and position in the data; `prompt` finds a prompt by its uid."""
        from lit_rlsched.rollout.packing import unpack

        if state["source"] is not None:
            assert self.source is not None
            self.source.load_state_dict(state["source"])
        self._groups = {group.id: group for group in unpack(state["pool"], prompt)}
        self._audit, self.runs = PoolAudit.from_state(state["audit"]), state["runs"]
