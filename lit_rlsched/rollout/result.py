"""What became of decoded tokens: trained on, kept for later, or discarded."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Completion, Group, Prompt


class Attempt(NamedTuple):
    """Length of one draw of a completion."""

    tokens: int
    finished: bool
    first: bool = True
    """Whether the completion was never discarded before."""
    waited: int = 0
    """Decode steps that passed while its tools ran."""


@dataclass(slots=True)
class DraftAudit:
    """Outcome of verifying the drafts that a round began with."""

    tokens: int = 0
    accepted_tokens: int = 0
    completed: int = 0
    """Drafts that were accepted whole."""
    lost: int = 0
    """Drafts that were discarded because weights that drew them are not kept."""
    nonfinite: int = 0
    """Drafts that were discarded for a log-prob that is not finite."""
    drawn: int = 0
    """Tokens that the verification drew: one after each prefix that it kept."""

    def __add__(self, other: "DraftAudit") -> "DraftAudit":
        return DraftAudit(*(getattr(self, n) + getattr(other, n) for n in self.__slots__))

    @property
    def rejected_tokens(self) -> int:
        """Number of draft tokens that were not accepted."""
        return self.tokens - self.accepted_tokens

    def metrics(self) -> dict[str, float]:
        """Return `drafts/*`."""
        return {
            "drafts/tokens": self.tokens,
            "drafts/accepted_tokens": self.accepted_tokens,
            "drafts/accepted_share": self.accepted_tokens / max(1, self.tokens),
            "drafts/completed": self.completed,
        }


_ATTEMPTS = ("ran", "unfinished", "stale", "stopped")


@dataclass(slots=True)
class RoundResult:
    """What a rollout has drawn. Its prompts stay in the pool until `Pool.commit`."""

    planned: list[Group]
    """All groups of the round; replacements come last."""
    trained: list[Group]
    left: list[Group]
    """Groups that stay in the pool."""
    ran: list[Attempt]
    """All completions that have tokens, as they were when the round ended."""
    unfinished: list[Attempt]
    """Completions discarded at the end of the round, to be drawn again."""
    stale: list[Attempt] = field(default_factory=list)
    """Completions discarded before the round because they were too old."""
    stopped: list[Attempt] = field(default_factory=list)
    """Completions taken out of groups that needed no more, with or without tokens."""
    drafts: DraftAudit = field(default_factory=DraftAudit)
    """Outcome of the drafts that the round began with."""
    trace: RolloutTrace = field(default_factory=lambda: RolloutTrace(1))
    failures: Counter[str] = field(default_factory=Counter)
    """Failures of single completions: see `RolloutSession.failures`."""
    metrics: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors."""
        from lit_rlsched.rollout.packing import pack  # imports torch; simulations run without it

        return {
            "planned": pack(replace(group, completions=[]) for group in self.planned),
            "trained": pack(self.trained),
            "left": pack(self.left),
            "attempts": {n: [list(a) for a in getattr(self, n)] for n in _ATTEMPTS},
            "drafts": list(astuple(self.drafts)),
            "trace": self.trace.state_dict(),
            "failures": dict(self.failures),
            "metrics": dict(self.metrics),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> "RoundResult":
        """Create the result that `state_dict` described; `prompt` finds a prompt by its uid."""
        from lit_rlsched.rollout.packing import unpack

        planned, trained, left = (
            unpack(state[name], prompt) for name in ("planned", "trained", "left")
        )
        return cls(
            planned,
            trained,
            left,
            **{n: [Attempt(*a) for a in state["attempts"][n]] for n in _ATTEMPTS},
            drafts=DraftAudit(*state["drafts"]),
            trace=RolloutTrace.from_state(state["trace"]),
            failures=Counter(state["failures"]),
            metrics=dict(state["metrics"]),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens of all its completions."""
        return sum(a.tokens for a in self.ran)

    @property
    def discarded(self) -> list[Attempt]:
        """All discarded completions that have tokens; rejected draft tokens are not counted."""
        return [*self.stale, *self.unfinished, *(a for a in self.stopped if a.tokens)]

    @property
    def discarded_tokens(self) -> int:
        """Tokens of discarded completions and rejected tokens of drafts."""
        return sum(a.tokens for a in self.discarded) + self.drafts.rejected_tokens


def restart_stale(groups: Iterable[Group], version: int, rule: RoundRule) -> list[Attempt]:
    """Reset completions that are staler than the rule allows, and return the discarded draws."""
    if (most := rule.max_staleness) is None:
        return []
    stale = [c for g in groups for c in g.completions if c.staleness(version) > most]
    discarded = [attempt(completion) for completion in stale]
    for completion in stale:
        completion.restart()
    return discarded


def put_off_old(
    groups: Iterable[Group], version: int, rule: RoundRule
) -> list[tuple[Completion, Completion]]:
    """Make drafts of completions that are as old as `rule.verifies_from`, finished or not."""
    if (age := rule.verifies_from) is None:
        return []
    old = [c for g in groups for c in g.completions if c.staleness(version) >= age]
    before = [(completion, completion.copy()) for completion in old]
    for completion in old:
        completion.put_off()
    return before


_RESULTS = (
    *("text", "scores", "extra", "logged", "dropped", "finish_reason"),
    *("messages", "observation", "environment_state", "given", "waited", "tool_seconds"),
)
"""What follows from the tokens of a completion."""


def give_back_results(old: Iterable[tuple[Completion, Completion]]) -> None:
    """Give what `put_off_old` has taken back to completions that keep all their tokens."""
    for completion, was in old:
        if completion.token_ids == was.token_ids:
            for name in _RESULTS:
                setattr(completion, name, getattr(was, name))


def split_round(state: RoundState, rule: RoundRule, stale: Sequence[Attempt]) -> RoundResult:
    """Split a finished round into trained and remaining groups, and reset discarded completions."""
    groups = state.planned
    begun = [c for g in groups for c in (*g.completions, *state.stopped.get(g.id, ()))]
    ran = {id(c): (c, attempt(c)) for c in begun if c.token_ids}
    trained, left = rule.split(groups, state)
    stopped = [c for g in trained for c in state.stopped.get(g.id, ())]
    unfinished = []
    if not rule.keeps_unfinished:
        kept = {id(c) for c in (*stopped, *(c for g in trained for c in g.completions))}
        for key, (completion, drawn) in ran.items():
            if key not in kept:
                unfinished.append(drawn)
                completion.restart()
    attempts = [how for _, how in ran.values()], unfinished, list(stale)
    return RoundResult(groups, trained, left, *attempts, [attempt(c) for c in stopped])


def attempt(completion: Completion) -> Attempt:
    """Return the completion's current length, as an attempt."""
    first = not completion.attempts
    return Attempt(completion.drawn, completion.finished, first, completion.waited)


def mean_length(attempts: Sequence[Attempt]) -> float:
    """Estimate the mean length of completions if some are unfinished (Kaplan and Meier).

    An unfinished completion counts as long as the average completion that reached its length. The
    estimate is restricted to the longest length observed.
    """
    if not attempts:
        return 0.0
    if all(a.finished for a in attempts):
        return fmean(a.tokens for a in attempts)
    tokens = np.array([a.tokens for a in attempts])
    finished = np.array([a.finished for a in attempts])
    times, inverse, ended = np.unique(tokens, return_inverse=True, return_counts=True)
    at_risk = len(tokens) - np.concatenate([[0], ended.cumsum()[:-1]])
    events = np.bincount(inverse, weights=finished, minlength=len(times))
    surviving = np.concatenate([[1.0], np.cumprod(1 - events / at_risk)[:-1]])
    return float((surviving * np.diff(times, prepend=0)).sum())


def length_bias(trained: Sequence[int], drawn: Sequence[Attempt]) -> float:
    """Return mean length trained on over mean length drawn; 1.0 means no bias.

    If some draws are unfinished, all lengths are capped at the 98th percentile of the draws: too
    few came further to estimate how long the others would have become.
    """
    if not trained or not drawn:
        return 1.0
    most = max(a.tokens for a in drawn)
    if not all(a.finished for a in drawn):
        most = sorted(a.tokens for a in drawn)[int(0.98 * len(drawn))]
        trained = [min(tokens, most) for tokens in trained]
    cut = [Attempt(min(a.tokens, most), a.finished or a.tokens > most) for a in drawn]
    return fmean(trained) / mean_length(cut)


def wait_bias(trained: Sequence[Attempt], drawn: Sequence[Attempt]) -> float | None:
    """Return how long tools ran for each token trained on, over that of each token drawn.

    Below 1, slow tools let completions miss the end of their round. It is rough, as those that are
    cut count with what they had drawn and waited until then. None: no tool ran.
    """

    def rate(attempts: Sequence[Attempt]) -> float:
        return sum(a.waited for a in attempts) / max(1, sum(a.tokens for a in attempts))

    if not trained or not any(a.waited for a in drawn):
        return None
    return rate(trained) / rate(drawn)


@dataclass(slots=True)
class PoolAudit:
    """Totals over the rounds of a pool, from its first round until it is empty."""

    rounds: int = 0
    slot_seconds: float = 0.0
    idle_slot_seconds: float = 0.0
    tokens: int = 0
    """Decoded tokens, and those that verifications drew."""
    carried_tokens: int = 0
    """Tokens in the pool when it began, which an earlier pool decoded."""
    returned_tokens: int = 0
    """Tokens that rounds began with: drafts, and completions that were too old."""
    discarded_tokens: int = 0
    trained: list[int] = field(default_factory=list)
    """Length of each completion that was trained on."""
    first: list[Attempt] = field(default_factory=list)
    """First draw of each completion."""

    def add(self, result: RoundResult) -> None:
        """Add a round."""
        trace = result.trace
        self.rounds += 1
        slot_seconds = trace.slots * trace.seconds
        self.slot_seconds += slot_seconds
        self.idle_slot_seconds += trace.bubble_ratio * slot_seconds
        self.tokens += trace.tokens + result.drafts.drawn
        self.returned_tokens += result.drafts.tokens + sum(a.tokens for a in result.stale)
        self.discarded_tokens += result.discarded_tokens
        completions = [c for group in result.trained for c in group.completions]
        self.trained += (c.drawn for c in completions if not c.dropped)
        ended = [attempt(c) for c in completions]
        self.first += (a for a in (*ended, *result.discarded) if a.first)

    def metrics(self) -> dict[str, float]:
        """Return `pool/*`: rounds, bubble ratio, useful tokens, length bias.

        The length bias compares trained completions with first draws: a discarded completion counts
        with its unfinished first draw, and its redraw does not count again.
        """
        # the oldest drafts are verified first, so those of earlier pools come back first
        drawn = self.tokens + min(self.carried_tokens, self.returned_tokens)
        return {
            "pool/rounds": self.rounds,
            "pool/bubble_ratio": self.idle_slot_seconds / (self.slot_seconds or 1.0),
            "pool/useful_token_share": 1 - self.discarded_tokens / max(1, drawn),
            "pool/trained_over_drawn_length": length_bias(self.trained, self.first),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and lists of numbers."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return {**state, "trained": [*self.trained], "first": [list(a) for a in self.first]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PoolAudit":
        """Create the audit that `state_dict` described."""
        return cls(**{**state, "first": [Attempt(*a) for a in state["first"]]})
