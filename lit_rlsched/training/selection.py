"""Select the completions of a round that are trained on."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lit_rlsched.rollout.result import RoundResult, attempt, length_bias
from lit_rlsched.scheduling.down_sampling import RULES, Rule, informative, random
from lit_rlsched.training.round import Round, reward_matrix
from lit_rlsched.types import Completion, Group, stable_hash

Reason = Literal[
    "unscored", "too_few_scores", "uninformative", "down_sampled", "nonfinite_advantage", "stale"
]
"""Why a completion is not trained on; `too_few_scores`: fewer than two in its group."""


def drop(group: Group, rewards: Sequence[float] | np.ndarray, why: Reason) -> None:
    """Drop the completions of a group that were not dropped before.

    `why` holds for completions with a reward, if there are at least two of them. `rewards` are by
    index in the group, NaN where there is none.
    """
    if np.isfinite(rewards).sum() < 2:
        why = "too_few_scores"
    for completion in group.completions:
        unscored: Reason | None = "unscored" if np.isnan(rewards[completion.index]) else None
        completion.dropped = completion.dropped or unscored or why


def count_drops(round: Round) -> Counter[str]:
    """Count dropped completions by reason: `dropped/*`."""
    reasons = [c.dropped for c in round.completions if c.dropped in get_args(Reason)]
    return Counter(f"dropped/{why}" for why in reasons)


@dataclass(slots=True)
class Selection:
    """Down-sampling (PODS, arXiv 2504.13818): train on `keep` completions of each group."""

    keep: int
    rule: Rule = "max_variance"
    full_scope: bool = False
    drop_uninformative: bool = True
    reward_range: tuple[float, float] | None = None
    mask_truncated: bool = False

    def may_keep(self, completion: Completion) -> bool:
        """Whether the loss has this completion: what is masked teaches nothing."""
        return not (self.mask_truncated and completion.finish_reason == "length")

    def choices(self, groups: Sequence[Group], rewards: np.ndarray) -> np.ndarray:
        """The rewards `[P, G]` of completions that may be kept, NaN in place of others."""
        choices = rewards.copy()
        for group, row in zip(groups, choices, strict=True):
            row[[c.index for c in group.completions if not self.may_keep(c)]] = np.nan
        return choices

    def select(self, round: Round, weights: Sequence[float], by_group: bool, seed: int) -> None:
        """Drop the completions that are not selected, for each group by itself.

        Without `by_group`, advantages are not relative to the group and no group is uninformative.
        `seed` is for the rule `random`.
        """
        scores = reward_matrix(round.groups, weights).numpy()
        lacking = (0, 0), (0, max(0, self.keep - scores.shape[1]))
        choices = np.pad(self.choices(round.groups, scores), lacking, constant_values=np.nan)
        if self.rule == "random":
            seeds = (stable_hash(seed, group.id) for group in round.groups)
            kept = np.array(
                [random(row, self.keep, s) for row, s in zip(choices, seeds, strict=True)]
            )
        else:
            kept = RULES[self.rule](choices, self.keep)
        for group, row, indices in zip(round.groups, scores, kept, strict=True):
            chosen = indices[indices >= 0]
            compared = row if self.full_scope else row[chosen]
            enough = np.isfinite(compared).sum() > 1
            teaches = informative(compared) if self.drop_uninformative else enough
            if by_group and not teaches:
                drop(group, row, "uninformative" if enough else "too_few_scores")
                continue
            for completion in group.completions:
                if completion.index not in chosen and not completion.dropped:
                    unscored = np.isnan(row[completion.index])
                    completion.dropped = "unscored" if unscored else "down_sampled"


@dataclass(frozen=True, slots=True)
class Stop:
    """Stops a group once `keep` of its rewards have the largest variance possible."""

    selection: Selection
    weights: Sequence[float]

    def waits(self, group: Group) -> bool:
        """Whether enough completions have finished."""
        done = [c for c in group.completions if c.finished and self.selection.may_keep(c)]
        return len(done) >= self.selection.keep

    def stops(self, group: Group) -> bool:
        """Whether half of the `keep` have the minimum reward and the others the maximum."""
        assert self.selection.reward_range is not None
        keep, (low, high) = self.selection.keep, self.selection.reward_range
        rewards = self.selection.choices([group], reward_matrix([group], self.weights).numpy())
        rewards = rewards[np.isfinite(rewards)]
        slack = 1e-9 * (high - low)  # for rounding of weighted sums
        if (rewards < low - slack).any() or (rewards > high + slack).any():
            return False  # the given range is wrong
        worst = (rewards <= low + slack).sum()
        best = (rewards >= high - slack).sum()
        half, rest = keep // 2, keep - keep // 2
        return bool(min(worst, best) >= half and max(worst, best) >= rest)


@dataclass(frozen=True, slots=True)
class Pilot:
    """Stops a group whose first completions all have the same reward."""

    size: int
    weights: Sequence[float]

    def waits(self, group: Group) -> bool:
        """Whether the first completions have finished, and no other has begun."""
        return all(c.finished for c in group.completions[: self.size]) and not group.begun(
            self.size
        )

    def stops(self, group: Group) -> bool:
        """Whether the first completions teach nothing."""
        return not informative(reward_matrix([group], self.weights)[0].numpy())


def selection_metrics(round: Round, result: RoundResult) -> dict[str, float]:
    """Metrics of the selection: `down_sampling/*`."""
    kept = [c for c in round.completions if not c.dropped]
    empty = sum(all(c.dropped for c in g.completions) for g in round.groups)
    finished = [attempt(c) for c in round.completions]
    return {
        "down_sampling/kept": len(kept) / len(round.completions),
        "down_sampling/empty_groups": empty / len(round.groups),
        "down_sampling/finished_over_drawn_length": length_bias(
            [a.tokens for a in finished], [*finished, *(a for a in result.stopped if a.tokens)]
        ),
    }
