"""What became of what was decoded: trained on, kept for later, or thrown away."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Completion, Group


class Attempt(NamedTuple):
    """A completion as far as it was drawn."""

    tokens: int
    finished: bool
    first: bool = True
    """Whether it was never thrown away before."""


@dataclass(slots=True)
class DraftAudit:
    """What became of the drafts that a round began with."""

    tokens: int = 0
    accepted_tokens: int = 0
    completed: int = 0
    """Drafts that were kept as a whole."""
    distance: float = 0.0
    """Sum over tokens of `max(0, 1 - p/q)`, the share that one by one would be rejected."""
    nonfinite: int = 0
    """Drafts that were thrown away for a log-prob that is not finite."""

    def __add__(self, other: "DraftAudit") -> "DraftAudit":
        return DraftAudit(*(getattr(self, n) + getattr(other, n) for n in self.__slots__))

    @property
    def rejected_tokens(self) -> int:
        """Those that were decoded for nothing."""
        return self.tokens - self.accepted_tokens

    def metrics(self) -> dict[str, float]:
        """`drafts/*`."""
        return {
            "drafts/tokens": self.tokens,
            "drafts/accepted_tokens": self.accepted_tokens,
            "drafts/accepted_share": self.accepted_tokens / max(1, self.tokens),
            "drafts/completed": self.completed,
            "drafts/distance": self.distance / max(1, self.tokens),
        }


@dataclass(slots=True)
class Harvest:
    """A round's groups, settled."""

    trained: list[Group]
    left: list[Group]
    """They stay in the pool."""
    ran: list[Attempt]
    """Every completion of which something was drawn."""
    unfinished: list[Attempt]
    """What the end of the round threw away, to be drawn anew."""
    stale: list[Attempt] = field(default_factory=list)
    """What had been thrown away before it began, as too old."""
    stopped: list[Attempt] = field(default_factory=list)
    """What was taken out of groups that needed no more, begun or not; it is not drawn anew."""
    drafted: list[Attempt] = field(default_factory=list)
    """What was put off, its tokens kept as drafts."""
    drafts: DraftAudit = field(default_factory=DraftAudit)
    """What became of those that it began with."""

    @property
    def discarded(self) -> list[Attempt]:
        """All that was thrown away, but for what was rejected of drafts."""
        return [*self.stale, *self.unfinished, *(a for a in self.stopped if a.tokens)]

    @property
    def discarded_tokens(self) -> int:
        """All that was decoded for nothing, as far as is known."""
        return sum(a.tokens for a in self.discarded) + self.drafts.rejected_tokens


def restart_stale(groups: Iterable[Group], version: int, rule: RoundRule) -> list[Attempt]:
    """Begin anew what is older than the rule allows; what it was."""
    if rule.max_staleness is None:
        return []
    most = rule.max_staleness
    return _restart([c for g in groups for c in g.completions if c.staleness(version) > most])


def settle(
    groups: Sequence[Group], rule: RoundRule, state: RoundState, stale: Sequence[Attempt]
) -> Harvest:
    """After a round: what is trained on, and what is left of the rest.

    Args:
        groups: The round's.
        rule: The round's.
        state: In which it ended.
        stale: What was thrown away before it began.
    """
    begun = [c for g in groups for c in (*g.completions, *state.stopped.get(g.id, ()))]
    ran = {id(c): (c, attempt(c)) for c in begun if c.token_ids}
    trained, left = rule.settle(groups, state)
    stopped = [c for g in trained for c in state.stopped.get(g.id, ())]
    unfinished, drafted = [], []
    if rule.max_staleness == 0:
        kept = {id(c) for c in (*stopped, *(c for g in trained for c in g.completions))}
        lost = [c for key, (c, _) in ran.items() if key not in kept]
        waits = {id(c) for g in left for c in g.completions} if rule.keeps_drafts else set()
        drafted = [ran[id(c)][1] for c in lost if id(c) in waits]
        unfinished = _restart(c for c in lost if id(c) not in waits)
        for completion in (c for c in lost if id(c) in waits):
            completion.put_off()
    return Harvest(
        trained,
        left,
        [how for _, how in ran.values()],
        unfinished,
        list(stale),
        [attempt(c) for c in stopped],
        drafted,
    )


def attempt(completion: Completion) -> Attempt:
    """How far a completion came."""
    return Attempt(len(completion.token_ids), completion.finished, not completion.attempts)


def _restart(completions: Iterable[Completion]) -> list[Attempt]:
    attempts = []
    for completion in completions:
        attempts.append(attempt(completion))
        completion.restart()
    return attempts


def mean_length(attempts: Sequence[Attempt]) -> float:
    """Mean length of completions of which some were cut short: Kaplan and Meier's estimate.

    Those that were not finished count as longer than they had become, by as much as the others are
    that came as far. Where none came further, the mean is one up to there.
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
    """Mean length trained on over mean length drawn: 1.0 where nothing biases it.

    Where some were cut short, lengths count up to what one in fifty came to: beyond,
    there are too few to tell how long the others would have become.
    """
    if not trained or not drawn:
        return 1.0
    most = max(a.tokens for a in drawn)
    if not all(a.finished for a in drawn):
        most = sorted(a.tokens for a in drawn)[int(0.98 * len(drawn))]
        trained = [min(tokens, most) for tokens in trained]
    cut = [Attempt(min(a.tokens, most), a.finished or a.tokens > most) for a in drawn]
    return fmean(trained) / mean_length(cut)


@dataclass(slots=True)
class PoolAudit:
    """The same figures over a whole pool, from its first round until it is empty."""

    rounds: int = 0
    slot_seconds: float = 0.0
    idle_slot_seconds: float = 0.0
    tokens: int = 0
    """Decoded."""
    discarded_tokens: int = 0
    recovered_tokens: int = 0
    """Of drafts, accepted."""
    trained: list[int] = field(default_factory=list)
    """Length of each completion that was trained on."""
    first: list[Attempt] = field(default_factory=list)
    """How each went when it was drawn for the first time."""

    def add(self, harvest: Harvest, trace: RolloutTrace) -> None:
        """Take in a round."""
        self.rounds += 1
        slot_seconds = trace.slots * trace.seconds
        self.slot_seconds += slot_seconds
        self.idle_slot_seconds += trace.bubble_ratio * slot_seconds
        self.tokens += trace.tokens
        self.discarded_tokens += harvest.discarded_tokens
        self.recovered_tokens += harvest.drafts.accepted_tokens
        completions = [c for group in harvest.trained for c in group.completions]
        self.trained += (len(c.token_ids) for c in completions if not c.dropped)
        ended = [attempt(c) for c in completions]
        self.first += (a for a in (*ended, *harvest.discarded, *harvest.drafted) if a.first)

    def metrics(self) -> dict[str, float]:
        """`pool/*`: rounds, bubble ratio with every drain included, useful tokens, length bias.

        The bias is that of what is trained on against first draws: what was thrown away and drawn
        anew, or on from a draft, counts as long as it had become, and more, the first time, and not
        again. With drafts also how much of what would have been thrown away they recovered.
        """
        wasted = self.recovered_tokens + self.discarded_tokens
        recovered = {"pool/recovered_token_share": self.recovered_tokens / max(1, wasted)}
        return {
            **(recovered if self.recovered_tokens else {}),
            "pool/rounds": self.rounds,
            "pool/bubble_ratio": self.idle_slot_seconds / (self.slot_seconds or 1.0),
            "pool/useful_token_share": 1 - self.discarded_tokens / max(1, self.tokens),
            "pool/trained_over_drawn_length": length_bias(self.trained, self.first),
        }

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists of them."""
        state = {name: getattr(self, name) for name in self.__slots__}
        return {**state, "trained": [*self.trained], "first": [list(a) for a in self.first]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PoolAudit":
        """What `state_dict` described."""
        return cls(**{**state, "first": [Attempt(*a) for a in state["first"]]})
