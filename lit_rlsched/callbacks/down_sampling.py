"""PODS: draw many completions of a prompt, train on the few that say most."""

import math
from typing import Any, Literal, get_args

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.down_sampling import Rule
from lit_rlsched.settings import check_choice, check_count
from lit_rlsched.training.round import Round
from lit_rlsched.training.selection import Selection


class DownSampling(RolloutCallback):
    """Train on `keep` of each prompt's `num_generations` completions.

    Policy Optimization with Down-Sampling (PODS, arXiv 2504.13818). Drawing completions is parallel
    and light on memory, the update is not: so draw many, score all, and train on those whose
    rewards differ most. Selection is inside a group, as soon as all of it is there, whatever the
    schedule; with `SortedBatching` whole groups are then trained on, whatever the advantage.

    What the method does to what is learned: the gradient is that of the selected completions and no
    estimate of the gradient over all. `max_variance` takes the extremes, the good and the bad in
    about equal number, however rare one of them is; `max_reward` never sees a bad one, and
    collapsed in the paper; `random` selects without bias. `rollout/trained_over_drawn_length` says
    what that does to lengths, `down_sampling/*` what was left out; the metrics of rewards and
    completions are of all that was drawn. `dropped/<why>` counts, since the run began, completions
    that were left out: `down_sampled`; `unscored`; in a group of less than two scored ones,
    `too_few_scores`; in one whose selected rewards are all equal, `uninformative`.

    Args:
        keep: Completions of each prompt that are trained on (the paper's m), from 2 on.
        rule: `max_variance`; `max_reward`; `percentile`, evenly over the sorted rewards; `random`.
        advantage_scope: What a reward is compared with: the `selected` (the paper), or the `full`
            group, which keeps the sign that a completion's advantage has without selection.
        drop_uninformative: Leave groups out where all rewards that are compared are equal, so that
            they do not count in what the loss is divided by either. With
            `advantage="reinforce++"` there are none. A step without anything to train on changes
            no weight and is counted in `batch/empty_steps`.
        early_stop: Abort what still decodes of a group once its finished completions have the
            largest variance that `keep` rewards in `reward_range` can have: for rewards of 0 or 1,
            half of them 0 and half 1. Saves decoding too, but favours what is short. Before a step
            that could follow a stop the round waits for the scores, so that how long reward
            functions take decides nothing. Aborted completions are counted in `dropped/stopped`.
        reward_range: Least and largest reward there can be, weights included, for `early_stop`. A
            group with a reward outside does not stop early.
        min_length_ratio: Guard of `early_stop`: after a round whose finished completions were
            shorter on average than this share of what was drawn
            (`down_sampling/finished_over_drawn_length`; Kaplan and Meier's estimate, as those
            aborted would have become longer), the next one decodes all to their end.

    Raises:
        ValueError: an argument is out of range, or contradicts another one.

    Example::

        data = RolloutDataModule(..., num_generations=32)
        Trainer(callbacks=[DownSampling(keep=8)]).fit(module, datamodule=data)
    """

    sets = "which completions are trained on"

    def __init__(
        self,
        keep: int,
        rule: Rule = "max_variance",
        advantage_scope: Literal["selected", "full"] = "selected",
        drop_uninformative: bool = True,
        early_stop: bool = False,
        reward_range: tuple[float, float] = (0.0, 1.0),
        min_length_ratio: float = 0.9,
    ) -> None:
        check_count("DownSampling", "keep", keep, 2, "A reward is compared with others.")
        check_choice("DownSampling", "rule", rule, get_args(Rule))
        check_choice("DownSampling", "advantage_scope", advantage_scope, ("selected", "full"))
        if early_stop and rule != "max_variance":
            raise ValueError(
                f"`DownSampling(early_stop=True, {rule=})`: a group stops once the variance of its "
                "rewards is as large as it can be. Use `rule='max_variance'`, or leave "
                "`early_stop` out."
            )
        low, high = reward_range
        if not -math.inf < low < high < math.inf:
            raise ValueError(
                f"`DownSampling({reward_range=})`: give the least reward, then the largest, both "
                "finite."
            )
        if not 0 <= min_length_ratio <= 1:
            raise ValueError(f"`DownSampling({min_length_ratio=})`: use 0 (no guard) to 1.")
        self.keep = keep
        self.rule: Rule = rule
        self.advantage_scope = advantage_scope
        self.drop_uninformative = drop_uninformative
        self.early_stop = early_stop
        self.reward_range = (float(low), float(high))
        self.min_length_ratio = min_length_ratio
        self._guarded = False
        self._selection: Selection | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the selection into the schedule."""
        schedule, run = rollout_schedule(trainer, self)
        drawn = run.num_generations
        if self.keep > drawn:
            raise ValueError(
                f"`DownSampling(keep={self.keep})` of `num_generations={drawn}`: there are not as "
                f"many. Use {drawn} or less, or more `num_generations`."
            )
        if self.early_stop and self.keep == drawn:
            raise ValueError(
                f"`DownSampling(early_stop=True, keep={self.keep})` of `num_generations={drawn}`: "
                "all are needed, so that no group can stop. Keep fewer, or leave `early_stop` out."
            )
        self._selection = schedule.selection = Selection(
            self.keep, self.rule, self.advantage_scope == "full", self.drop_uninformative
        )

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, plan: list[Any]) -> None:
        """Let groups stop early, unless the last round was too short for it."""
        assert self._selection is not None
        stops = self.early_stop and not self._guarded
        self._selection.reward_range = self.reward_range if stops else None

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Look at what stopping did to the lengths."""
        ratio = round.metrics["down_sampling/finished_over_drawn_length"]
        if self.early_stop and ratio < self.min_length_ratio and not self._guarded:
            rank_zero_info(
                f"DownSampling: what finished is {ratio:.2f} as long as what was drawn; the next "
                f"round stops no group early (`min_length_ratio={self.min_length_ratio}`)."
            )
        self._guarded = ratio < self.min_length_ratio

    def state_dict(self) -> dict[str, Any]:
        """Whether the next round may stop groups early."""
        return {"guarded": self._guarded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._guarded = state_dict["guarded"]
