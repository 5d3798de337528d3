"""Trains on some completions of a group (PODS)."""

from typing import Any, Literal

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.down_sampling import Rule
from lit_rlsched.settings import UsageError
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, Schedule
from lit_rlsched.training.selection import Selection


class DownSampling(RolloutCallback):
    """Train on `keep` of each prompt's `num_generations` completions.

    Policy Optimization with Down-Sampling (PODS, arXiv 2504.13818). Drawing a completion costs less
    memory and time than training on it. So draw many, and train on those whose rewards differ most.

    Bias: the gradient is that of the selected completions, not an estimate of the gradient over
    all. `max_variance` takes good and bad completions in about equal numbers, even if one kind is
    rare. `max_reward` sees no bad ones, and collapsed in the paper. Only `random` is unbiased,
    and only without `mask_truncated_completions`, as what that leaves out is never kept.
    `rollout/trained_over_drawn_length` and `down_sampling/*` show what is selected.

    See `docs/explanation/pods.md`.

    Args:
        keep: Completions of each prompt to train on (the paper's m), at least 2.
        rule: `max_variance`, `max_reward`, `percentile` (evenly spaced over the sorted rewards) or
            `random`.
        advantage_scope: An advantage compares a reward with the `selected` ones (as in the paper)
            or with the `full` group's. By default `full` with `mask_truncated_completions`, where
            right answers beside cut ones teach to end in time, and else `selected`.
        drop_uninformative: Leave out groups whose compared rewards are all equal, also from the
            divisor of the loss. No effect on other `advantage`s than `group`.
        early_stop: Abort the rest of a group once its finished completions have the largest
            variance that `keep` rewards within `reward_range` can have. Saves decoding, but favours
            short completions.
        reward_range: For `early_stop`: smallest and largest possible reward, weights included. A
            group with a reward outside does not stop early.
        min_length_ratio: For `early_stop`: the next round stops no group if the mean length of
            finished completions is below this share of the mean length drawn
            (`down_sampling/finished_over_drawn_length`). 0 never pauses `early_stop`.

    Raises:
        UsageError: an argument is out of range, or contradicts another one.

    Example::

        data = RolloutDataModule(..., num_generations=32)
        Trainer(callbacks=[DownSampling(keep=8)]).fit(module, datamodule=data)
    """

    sets = "which completions are trained on"

    def __init__(
        self,
        keep: int,
        rule: Rule = "max_variance",
        advantage_scope: Literal["selected", "full"] | None = None,
        drop_uninformative: bool = True,
        early_stop: bool = False,
        reward_range: tuple[float, float] = (0.0, 1.0),
        min_length_ratio: float = 0.9,
    ) -> None:
        if early_stop and rule != "max_variance":
            raise UsageError(
                f"`DownSampling(early_stop=True, {rule=})`: groups stop at the largest possible "
                "variance. Use `rule='max_variance'`, or leave `early_stop` out."
            )
        low, high = reward_range
        if low >= high:
            raise UsageError(
                f"`DownSampling({reward_range=})`: give the smallest reward, then the largest."
            )
        if not early_stop and (low, high, min_length_ratio) != (0.0, 1.0, 0.9):
            raise UsageError(
                f"`DownSampling({reward_range=}, {min_length_ratio=})` without `early_stop=True`: "
                "they have no effect. Set it, or leave them out."
            )
        self.keep, self.rule = keep, rule
        self.advantage_scope, self.drop_uninformative = advantage_scope, drop_uninformative
        self.early_stop, self.min_length_ratio = early_stop, min_length_ratio
        self.reward_range = float(low), float(high)
        self._guarded = False
        self._selection: Selection | None = None

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the selection."""
        masks = facts.settings.mask_truncated_completions
        full = masks if self.advantage_scope is None else self.advantage_scope == "full"
        stops_within = self.reward_range if self.early_stop else None
        self._selection = schedule.selection = Selection(
            self.keep, self.rule, full, self.drop_uninformative, stops_within, masks
        )

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, plan: list[Any]) -> None:
        """Enable `early_stop`, unless the last round was too biased."""
        assert self._selection is not None
        stops = self.early_stop and not self._guarded
        self._selection.reward_range = self.reward_range if stops else None

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Pause `early_stop` for a round if finished completions were too short."""
        ratio = round.metrics["down_sampling/finished_over_drawn_length"]
        if self.early_stop and ratio < self.min_length_ratio and not self._guarded:
            rank_zero_info(
                f"DownSampling: finished completions were {ratio:.2f} as long as drawn ones; the "
                f"next round stops no group early (`min_length_ratio={self.min_length_ratio}`)."
            )
        self._guarded = ratio < self.min_length_ratio

    def state_dict(self) -> dict[str, Any]:
        """Return whether `early_stop` is paused in the next round."""
        return {"guarded": self._guarded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self._guarded = state_dict["guarded"]
