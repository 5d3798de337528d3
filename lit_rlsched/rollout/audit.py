"""What became of what was decoded: trained on, kept for later, or thrown away."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Completion, Group
from lit_rlsched.scheduling.rounds import RoundPolicy


class Attempt(NamedTuple):
    """A completion as far as it was drawn."""

    tokens: int
    finished: bool


@dataclass(slots=True)
class Harvest:
    """A round's groups, settled."""

    trained: list[Group]
    left: list[Group]
    """They stay in the pool."""
    ran: list[Attempt]
    """Every completion of which something was drawn."""
    discarded: list[Attempt]
    """What was thrown away, to be drawn anew."""


def restart_stale(groups: Iterable[Group], version: int, policy: RoundPolicy) -> list[Attempt]:
    """Begin anew what is older than the policy allows; what it was."""
    if policy.max_staleness is None:
        return []
    most = policy.max_staleness
    return _restart([c for g in groups for c in g.completions if c.staleness(version) > most])


def settle(groups: Sequence[Group], policy: RoundPolicy, stale: Sequence[Attempt]) -> Harvest:
    """After a round: what is trained on, and what is left of the rest.

    Args:
        groups: The round's.
        policy: The round's.
        stale: What was thrown away before it began.
    """
    ran = [attempt(c) for g in groups for c in g.completions if c.token_ids]
    trained, left = policy.settle(groups)
    discarded = [*stale]
    if policy.max_staleness == 0:
        discarded += _restart(c for g in left for c in g.completions if c.token_ids)
    return Harvest(trained, left, ran, discarded)


def attempt(completion: Completion) -> Attempt:
    """How far a completion came."""
    return Attempt(len(completion.token_ids), completion.finished)


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
    """Mean length trained on over mean length drawn: 1.0 where nothing biases it."""
    if not trained or not drawn:
        return 1.0
    return fmean(trained) / mean_length(drawn)


@dataclass(slots=True)
class PoolAudit:
    """The same figures over a whole pool, from its first round until it is empty."""

    rounds: int = 0
    slot_seconds: float = 0.0
    idle_slot_seconds: float = 0.0
    tokens: int = 0
    """Decoded."""
    trained: list[int] = field(default_factory=list)
    """Length of each completion that was trained on."""
    discarded: list[Attempt] = field(default_factory=list)

    def add(self, harvest: Harvest, trained: Iterable[int], trace: RolloutTrace) -> None:
        """Take in a round and the lengths that are trained on of it."""
        self.rounds += 1
        slot_seconds = trace.slots * trace.seconds
        self.slot_seconds += slot_seconds
        self.idle_slot_seconds += trace.bubble_ratio * slot_seconds
        self.tokens += trace.tokens
        self.trained += trained
        self.discarded += harvest.discarded

    def metrics(self) -> dict[str, float]:
        """`pool/*`: rounds, bubble ratio with every drain included, useful tokens, length bias."""
        drawn = [*self.discarded, *(Attempt(tokens, True) for tokens in self.trained)]
        discarded = sum(a.tokens for a in self.discarded)
        return {
            "pool/rounds": self.rounds,
            "pool/bubble_ratio": self.idle_slot_seconds / (self.slot_seconds or 1.0),
            "pool/useful_token_share": 1 - discarded / max(1, self.tokens),
            "pool/trained_over_drawn_length": length_bias(self.trained, drawn),
        }

    def state_dict(self) -> dict[str, Any]:
        """Numbers and lists of them."""
        return {
            "rounds": self.rounds,
            "slot_seconds": self.slot_seconds,
            "idle_slot_seconds": self.idle_slot_seconds,
            "tokens": self.tokens,
            "trained": list(self.trained),
            "discarded": [list(a) for a in self.discarded],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PoolAudit":
        """What `state_dict` described."""
        return cls(**{**state, "discarded": [Attempt(*a) for a in state["discarded"]]})
