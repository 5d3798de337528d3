"""One of several round rules at a time; a switch keeps the pool and its drafts."""

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group


def _of_rule(name: str) -> Any:
    """Return a property: the attribute or method of the rule that is in charge."""
    return property(lambda self: getattr(self.rule, name))


class SwitchedRound(RoundRule):
    """Acts as the rule with the number `chosen`, which may change between two rounds.

    What a rule has left in the pool is drawn by the next one, in the same order. Unfinished
    completions stay as drafts, which any rule verifies. If the pool holds fewer prompts than an
    update, fresh ones are added, so that no round after a switch is smaller.

    Args:
        rules: Rules by number, with as many prompts in an update, without domains and without races
            of single completions. A rule that ends early must keep what it leaves, as drafts or as
            tokens of an earlier policy.
    """

    def __init__(self, rules: Mapping[int, RoundRule]) -> None:
        every = rules.values()
        assert all(r.keeps_drafts or r.max_staleness != 0 or not r.ends_early for r in every)
        assert len({rule.update_prompts for rule in every}) == 1
        assert not any(rule.has_domains or rule.stops_groups for rule in every)
        self.rules = rules
        self.chosen = min(rules)
        self.update_prompts = self.rule.update_prompts
        self.most_deferred = max(rule.most_deferred for rule in every)

    @property
    def rule(self) -> RoundRule:
        """The rule that is in charge."""
        return self.rules[self.chosen]

    keeps_drafts = True
    max_staleness = _of_rule("max_staleness")
    ends_early = _of_rule("ends_early")
    patience = _of_rule("patience")
    is_long = _of_rule("is_long")
    metrics = _of_rule("metrics")
    awaits = _of_rule("awaits")
    plan = _of_rule("plan")
    may_leave = _of_rule("may_leave")
    draws_following = _of_rule("draws_following")
    plan_following = _of_rule("plan_following")
    ends_cycle = _of_rule("ends_cycle")
    done = _of_rule("done")
    final_groups = _of_rule("final_groups")
    discards = _of_rule("discards")
    settle = _of_rule("settle")

    @property
    def off_policy(self) -> bool:
        """Whether any of the rules is, so that the loss does not change with the rule."""
        return any(rule.off_policy for rule in self.rules.values())

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return sum(n for _, n in self.draws(pool))

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """Prompts that the rule asks for, and those that the update lacks."""
        fresh = sum(n for _, n in self.rule.draws(pool))
        return [(None, max(fresh, self.update_prompts - len(pool)))]

    def most_prompts(self) -> int:
        return max(rule.most_prompts() for rule in self.rules.values())

    def check_enough(self, prompts: int) -> None:
        for rule in self.rules.values():
            try:
                rule.check_enough(prompts)
            except UsageError as error:
                raise UsageError(f"A candidate of `AutoSchedule`: {error}") from None
