"""Chooses the prompts that a round draws by what is known of them."""

import math
import warnings
from collections.abc import Container, Sequence
from itertools import islice
from typing import Literal

import numpy as np

from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.types import stable_hash

Rule = Literal["thompson", "skip_solved", "uniform"]


class Chooser:
    """Chooses prompts; see `lit_rlsched.callbacks.PromptChoice`.

    What it chooses follows from the statistics, a seed and the number of prompts drawn before.
    """

    def __init__(self, rule: Rule, target: float, explore: float, seed: int) -> None:
        self.rule, self.target, self.seed = rule, target, seed
        self.explore = 1.0 if rule == "uniform" else explore
        self.connect(PromptStatistics())
        self.warned = False
        """Whether it was said that there is nothing to choose by."""

    def connect(self, statistics: PromptStatistics) -> None:
        """Choose by what a run knows of each prompt."""
        self.statistics = statistics

    def explored(self, before: int, n: int) -> int:
        """Return how many of the next `n` prompts come in the data's order.

        It is a share of all prompts, `before` of which were drawn; errors of rounding cost none.
        """
        first, last = (math.floor(m * self.explore + 1e-9) for m in (before, before + n))
        return last - first

    def choose(
        self, uids: Sequence[str], taken: Container[int], n: int, domain: str | None, before: int
    ) -> list[int]:
        """Return the positions in `uids` of `n` prompts that are not in `taken`, the best first."""
        key = stable_hash("prompt choice", self.seed, domain or "", before)
        noise = np.random.Generator(np.random.Philox(key=key))
        equal = self.statistics.equal(uids)
        if equal.all():
            self._warn(len(uids))
            ranked = noise.permutation(len(uids))
        elif self.rule == "skip_solved":
            # each time without a signal halves the chance that a prompt is not passed over
            order = noise.permutation(len(uids))
            passed = noise.random(len(uids)) >= 0.5 ** equal[order]
            ranked = np.concatenate([order[~passed], order[passed]])
        elif self.statistics.binary:
            rates = self.statistics.sample_success(uids, noise)
            ranked = np.argsort(np.abs(rates - self.target), kind="stable")
        else:
            ranked = np.argsort(-self.statistics.sample_spread(uids, noise), kind="stable")
        return [*islice((int(i) for i in ranked if i not in taken), n)]

    def _warn(self, prompts: int) -> None:
        if self.warned:
            return
        self.warned = True
        warnings.warn(
            f"`PromptChoice({self.rule})`: the last completions of each of the {prompts} prompts "
            "had equal rewards, so there is nothing to choose by, and prompts are drawn at random. "
            "Use harder or easier prompts, or end the run.",
            stacklevel=2,
        )
