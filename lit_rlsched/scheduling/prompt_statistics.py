"""What a run knows of its prompts, from the completions that it has trained on."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any

import numpy as np

from lit_rlsched.scheduling.down_sampling import informative
from lit_rlsched.types import Group

DECAY = 0.9
"""Weight of what is known of a prompt for each completion that it draws; a group's weigh alike."""
PRIOR = 2.0
"""Completions of a prompt that weigh as much as what is known of all prompts."""
HALF_LIFE = 2000.0
"""Completions of the run after which one counts half in the means of all prompts."""
MOST = 100_000
"""Prompts to remember: those that were trained on last."""


@dataclass(slots=True)
class PromptRecord:
    """What is known of a prompt. Sums are decayed: a newer completion weighs more."""

    groups: int = 0
    """Number of times that it was trained on."""
    round: int = 0
    """Number of the last round that did so."""
    equal: int = 0
    """Times in a row, the last one included, that two or more rewards were all equal."""
    scored: float = 0.0
    """Completions with a reward."""
    reward: float = 0.0
    """Sum of their rewards."""
    square: float = 0.0
    """Sum of their squares."""
    drawn: float = 0.0
    """Completions."""
    length: float = 0.0
    """Sum of their lengths: in tokens for the run, relative to the run's mean for a prompt."""

    def add(self, lengths: Sequence[float], rewards: Sequence[float], decay: float) -> None:
        """Add completions; what was known before counts less by the factor `decay`."""
        self.scored = self.scored * decay + len(rewards)
        self.reward = self.reward * decay + sum(rewards)
        self.square = self.square * decay + sum(reward * reward for reward in rewards)
        self.drawn = self.drawn * decay + len(lengths)
        self.length = self.length * decay + sum(lengths)


class PromptStatistics:
    """Rewards and lengths of each prompt, saved in checkpoints.

    Only completions of a round that is trained on are counted, those that `DownSampling` leaves out
    included. What is drawn for later rounds is unknown until then.
    """

    def __init__(self) -> None:
        self.prompts: dict[str, PromptRecord] = {}
        """By uid, the prompts that were trained on last at the end."""
        self.run = PromptRecord()
        """The same of all prompts."""
        self.binary = True
        """Whether all rewards so far were 0 or 1."""

    def observe(
        self, number: int, groups: Sequence[Group], rewards: Sequence[Sequence[float]] = ()
    ) -> None:
        """Learn from the groups of a round.

        Args:
            number: Number of the round.
            groups: Those that the round trains on.
            rewards: `[P, G]`, by index in the group, NaN where there is none. Empty: lengths alone.
        """
        lengths = [[max(1.0, c.drawn) for c in group.completions] for group in groups]
        known = [[r for r in row if math.isfinite(r)] for row in rewards] or [[]] * len(groups)
        drawn, run = [*chain(*lengths)], self.run
        run.add(drawn, [*chain(*known)], 0.5 ** (len(drawn) / HALF_LIFE))
        self.binary = self.binary and {*chain(*known)} <= {0.0, 1.0}
        for group, of_group, scores in zip(groups, lengths, known, strict=True):
            uid = group.prompt.uid
            self.prompts[uid] = record = self.prompts.pop(uid, None) or PromptRecord()
            record.groups, record.round = record.groups + 1, number
            relative = [length * run.drawn / run.length for length in of_group]
            record.add(relative, scores, DECAY ** len(of_group))
            if len(scores) > 1:
                record.equal = 0 if informative(np.array(scores)) else record.equal + 1
        while len(self.prompts) > MOST:
            del self.prompts[next(iter(self.prompts))]

    def relative_length(self, uid: str, prior: float = PRIOR) -> float:
        """Mean length of a prompt's completions over the run's; 1 for an unknown prompt."""
        record = self.prompts.get(uid) or PromptRecord()
        return (record.length + prior) / (record.drawn + prior)

    def means(self, uids: Iterable[str]) -> np.ndarray:
        """Expected reward of each prompt `[N]`, shrunk towards the run's mean."""
        run = self.run.reward / self.run.scored if self.run.scored else 0.0
        scored, reward, _ = self._sums(uids)
        return (reward + PRIOR * run) / (scored + PRIOR)

    def sample_success(self, uids: Iterable[str], noise: np.random.Generator) -> np.ndarray:
        """Draw a success rate of each prompt `[N]` from its posterior, for rewards of 0 and 1.

        A Beta distribution whose prior is uniform (MoPPS, arXiv 2507.04632, section 3.2).
        """
        scored, reward, _ = self._sums(uids)
        return noise.beta(1.0 + reward, 1.0 + scored - reward)

    def sample_spread(self, uids: Iterable[str], noise: np.random.Generator) -> np.ndarray:
        """Draw a standard deviation of each prompt's rewards `[N]`, for any rewards.

        A normal distribution around that of the known ones. An unknown prompt has the run's.
        """
        scored, reward, square = self._sums(uids)
        run = self.run
        of_run = run.square / run.scored - (run.reward / run.scored) ** 2 if run.scored else 1.0
        known = np.maximum(scored, 1.0)
        variance = np.where(scored > 0, square / known - (reward / known) ** 2, of_run)
        spread = np.sqrt(np.maximum(variance, 0.0))
        error = np.sqrt(max(of_run, 0.0) / (2 * known))
        return spread + error * noise.standard_normal(len(spread))

    def equal(self, uids: Iterable[str]) -> np.ndarray:
        """Times in a row that all rewards of each prompt were equal, `[N]`."""
        nothing = PromptRecord()
        return np.array([self.prompts.get(uid, nothing).equal for uid in uids])

    def _sums(self, uids: Iterable[str]) -> np.ndarray:
        nothing = PromptRecord()
        records = (self.prompts.get(uid, nothing) for uid in uids)
        return np.array([(r.scored, r.reward, r.square) for r in records]).reshape(-1, 3).T

    def state_dict(self) -> dict[str, Any]:
        """The records, as a tensor and primitives."""
        import torch

        records = [astuple(record) for record in (self.run, *self.prompts.values())]
        return {
            "uids": [*self.prompts],
            "records": torch.tensor(records, dtype=torch.float64),
            "binary": self.binary,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the records; the integers among them are exact."""
        rows = [PromptRecord(*map(int, row[:3]), *row[3:]) for row in state["records"].tolist()]
        self.run, self.prompts = rows[0], dict(zip(state["uids"], rows[1:], strict=True))
        self.binary = state["binary"]
