"""Chooses the prompts that a round draws by what is known of them."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.types import stable_hash

Rule = Literal["thompson", "skip_solved", "uniform"]


class Chooser:
    """Chooses prompts; see `lit_rlsched.callbacks.PromptChoice`.

    What it chooses follows from the statistics, a seed and the number of prompts so far.
    """

    def __init__(self, rule: Rule, target: float, explore: float, seed: int) -> None:
        self.rule, self.target, self.explore, self.seed = rule, target, explore, seed
        self.connect(PromptStatistics())
        self._warned = False
        self.counts: dict[str | None, tuple[int, int]] = {}
        """Prompts so far by domain: all, and those in the data's order."""

    def connect(self, statistics: PromptStatistics) -> None:
        """Choose by what a run knows of each prompt."""
        self.statistics = statistics

    def explored(self, n: int, domain: str | None) -> int:
        """Return how many of the next `n` prompts come in the data's order, and count them."""
        total, before = self.counts.get(domain, (0, 0))
        share = 1.0 if self.rule == "uniform" else self.explore
        # of so many prompts in all; an error of rounding must not cost one
        due = min(n, math.floor((total + n) * share + 1e-9) - before)
        self.counts[domain] = total + n, before + due
        return due

    def choose(self, uids: Sequence[str], n: int, domain: str | None) -> list[int]:
        """Return the positions of `n` of the prompts, the best first."""
        count, _ = self.counts[domain]
        key = stable_hash("prompt choice", self.seed, domain or "", count)
        noise = np.random.Generator(np.random.Philox(key=key))
        equal = self.statistics.equal(uids)
        if equal.all() and not self._warned:
            self._warned = True
            warnings.warn(
                f"`PromptChoice({self.rule})`: the last completions of each of the {len(uids)} "
                "prompts had equal rewards, so there is nothing to choose by, and prompts are "
                "drawn at random. Use harder or easier prompts, or end the run.",
                stacklevel=2,
            )
        if self.rule == "skip_solved" or equal.all():
            # each time without a signal halves the chance that a prompt is not passed over
            order = noise.permutation(len(uids))
            passed = noise.random(len(uids)) >= 0.5 ** equal[order]
            ranked = np.concatenate([order[~passed], order[passed]])
        elif self.statistics.binary:
            rates = self.statistics.sample_success(uids, noise)
            ranked = np.argsort(np.abs(rates - self.target), kind="stable")
        else:
            ranked = np.argsort(-self.statistics.sample_spread(uids, noise), kind="stable")
        return [int(i) for i in ranked[:n]]

    def state_dict(self) -> dict[str, Any]:
        """Numbers of prompts so far."""
        return {"counts": [[domain, *pair] for domain, pair in self.counts.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.counts = {domain: (total, explored) for domain, total, explored in state["counts"]}
