"""SortedRL: trains on short completions first, without idle slots or starving long ones."""

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.sorted_batching import Mode, SortedRound, Unit
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule


class SortedBatching(RolloutCallback):
    """Train as soon as an update's worth of completions is ready, short ones first.

    SortedRL (arXiv 2603.23414). A pool of `pool_rounds * prompts_per_round` prompts decodes. Once
    `update_prompts` of them are ready, the round ends, and the trainer trains on all that are
    ready. The others are drawn again or resumed under the new weights. Fresh prompts are loaded
    only after the whole pool was trained on, so no prompt starves.

    Bias: an update sees prompts of similar length. In `on_policy` mode a long completion may be
    discarded and be short when it is drawn again; `pool/trained_over_drawn_length` understates
    this. In `partial` mode tokens come from several policies (`staleness/*`), with clipped ratios;
    every completion that was begun is trained on, unless `max_staleness` discards it.

    See `docs/explanation/sorted_rl.md`.

    Args:
        pool_rounds: Size of a pool in rounds' worth of prompts (the paper's n). With 1, and the
            default `update_prompts`, the run equals the synchronous one bit for bit.
        update_prompts: Prompts of an update; by default `prompts_per_round`. The last update of a
            pool has what is left.
        mode: `on_policy` discards unfinished completions, `partial` keeps them, with log-probs and
            versions. `RolloutWindow` keeps what the newest policy would have drawn of them.
        max_staleness: For `mode="partial"`: maximum age of a trained token in policy versions
            (optimizer steps); older completions are drawn again. By default the pool is the only
            limit: in a pool of n updates tokens are at most n - 1 updates old.
        oversubscribe: Prompts that decode at once, as a multiple of `update_prompts`; by default
            the whole pool. Fewer waste fewer tokens in `on_policy` mode, but leave slots idle.
        mask_stale_tokens: For `mode="partial"`: train only on tokens of the newest policy. The
            others still count as useful in `rollout/useful_token_share`.

    Raises:
        UsageError: an argument is out of range, or contradicts the module or the data module.

    Example::

        Trainer(callbacks=[SortedBatching(pool_rounds=4), MicroGroupSampling(slots=64)])
    """

    sets = "when a round ends"

    def __init__(
        self,
        pool_rounds: int = 4,
        update_prompts: int | None = None,
        mode: Mode = "on_policy",
        max_staleness: int | None = None,
        oversubscribe: float | None = None,
        mask_stale_tokens: bool = False,
    ) -> None:
        stale = {"max_staleness": max_staleness, "mask_stale_tokens": mask_stale_tokens}
        for name, value in stale.items():
            if value and mode != "partial":
                raise UsageError(
                    f"`SortedBatching({name}={value!r}, {mode=})`: no token is stale in that mode. "
                    f"Use `mode='partial'`, or leave `{name}` out."
                )
        self.pool_rounds, self.update_prompts, self.mode = pool_rounds, update_prompts, mode
        self.max_staleness, self.oversubscribe = max_staleness, oversubscribe
        self.mask_stale_tokens = mask_stale_tokens

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule, and what becomes of stale tokens."""
        whole = facts.learner.needs_group or "DownSampling" in facts.callbacks
        unit: Unit = "group" if whole else "completion"
        prompts, generations = facts.settings.prompts_per_round, facts.settings.num_generations
        pool, update = self.pool_rounds * prompts, self.update_prompts or prompts
        if update > pool:
            raise UsageError(
                f"`SortedBatching(update_prompts={update})` is more than its pool holds: "
                f"`pool_rounds={self.pool_rounds}` times `prompts_per_round={prompts}` is {pool} "
                f"prompts. Use {pool} or less, or more `pool_rounds`."
            )
        schedule.rule = SortedRound(
            update, pool, generations, unit, self.mode, self.max_staleness, self.oversubscribe
        )
        schedule.mask_stale_tokens = self.mask_stale_tokens
        if self.mode == "partial":
            who = f"`SortedBatching(mode={self.mode!r})`"
            schedule.compares_logprobs[who] = "tokens are trained against"
            schedule.trains_on_stale = who
