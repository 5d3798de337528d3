"""SortedRL: train early on the short, without idle slots and without starving the long."""

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.checks import check_logprobs
from lit_rlsched.schedule import RunFacts
from lit_rlsched.scheduling.sorted_batching import Mode, SortedSettings, Unit


class SortedBatching(RolloutCallback):
    """Train as soon as an update's worth of completions is ready, the short ones first.

    SortedRL (arXiv 2603.23414). Prompts are loaded `pool_rounds * prompts_per_round` at a time, and
    all of that pool decodes, as far as there are slots. When `update_prompts` of them are ready the
    round is over and they are trained on, with whatever became ready in the same decode step; the
    others decode again, or go on, under the new weights. No fresh prompt is loaded before all of
    the pool has been trained on, so that nobody starves. Within a pool updates thus go from the
    short to the long (with slots for only a part of it, more or less so): the paper's
    micro-curriculum. So do the micro-batches of an update.

    What is trained on as a whole is a prompt with all its completions where the module compares
    those with each other (GRPO, RLOO), and a single completion with `advantage="reinforce++"`.

    What the method does to what is learned: in `on_policy` mode a completion that takes long may be
    thrown away and drawn anew, and may then be a short one, so that a prompt's completions are
    biased towards the short; `pool/trained_over_drawn_length` says at least by how much. In
    `partial` mode every completion that was begun is trained on (unless `max_staleness`
    intervenes), without that bias, but its tokens are of several policies: our module then clips
    the ratio to the policy that drew each token (`PolicyModule`'s `old_logprobs`), as the paper
    does. In both, an update sees prompts of like length.

    Each round logs `rollout/bubble_ratio` (equation 4, with `rollout/slots` as Q),
    `rollout/useful_token_share`, `rollout/attempts/*` (times a prompt was begun),
    `rollout/trained_over_drawn_length`, and in `partial` mode `staleness/*`; each pool, at its end,
    `pool/*`, the last drain included. Hooks: `on_completion_end` also fires for a completion that
    is then thrown away with its group, `on_group_end` only for what is trained on.

    Args:
        pool_rounds: Rounds' worth of prompts in a pool (the paper's n). With 1, and the default
            `update_prompts`, the run is the synchronous one, bit for bit.
        update_prompts: Prompts of an update; by default `prompts_per_round`. Of the last update of
            a pool what is left.
        mode: `on_policy` trains only on tokens of the newest policy and throws away what has not
            finished; `partial` keeps the tokens, with their log-probs and policy versions, and goes
            on after them.
        max_staleness: In `partial` mode, policy versions (optimizer steps) that a trained token may
            be old; a completion that began earlier is drawn anew. By default only the pool limits
            it: a pool of n updates has tokens of at most n - 1 updates ago.
        oversubscribe: Prompts that decode towards an update, as a multiple of `update_prompts`; by
            default the whole pool. Less wastes fewer tokens in `on_policy` mode, and idles more.
        mask_stale_tokens: In `partial` mode, train only on tokens of the newest policy. The others
            still count as useful in `useful_token_share`.

    Raises:
        ValueError: an argument is out of range, or contradicts the module or the data module.

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
        self.settings = SortedSettings(
            pool_rounds, update_prompts, mode, max_staleness, oversubscribe, mask_stale_tokens
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the rule into the schedule."""
        schedule, run = rollout_schedule(trainer, self)
        # a group is selected from as a whole
        whole = run.learner.needs_group or "DownSampling" in run.callbacks
        unit: Unit = "group" if whole else "completion"
        rule = self.settings.rule(run.prompts_per_round, run.num_generations, unit)
        if run.steps_per_round > 1:
            raise ValueError(
                f"`steps_per_round={run.steps_per_round}` with `SortedBatching`: each of "
                "its rounds is one update. Use `steps_per_round=1` and `SortedBatching("
                f"update_prompts={max(1, rule.update_prompts // run.steps_per_round)})`."
            )
        if self.settings.mode == "partial":
            self._check_partial(run, pl_module)
        schedule.rule = rule
        schedule.mask_stale_tokens = self.settings.mask_stale_tokens

    def _check_partial(self, run: RunFacts, pl_module: LightningModule) -> None:
        """Each token is weighed by the log-prob of the policy that drew it."""
        check_logprobs("`SortedBatching(mode='partial')`", run.engine, run.sampling)
        steps = run.num_iterations
        most = self.settings.max_staleness
        if most is not None and most < steps:
            raise ValueError(
                f"`SortedBatching(max_staleness={most})` with `num_iterations="
                f"{steps}`: a round takes that many optimizer steps, so that nothing would be gone "
                f"on with. Use {steps} or more, or `mode='on_policy'`."
            )
        module = pl_module.hparams
        corrected = module.get("importance_sampling_mode")
        if module.get("old_logprobs") == "trainer":
            if corrected is None and not self.settings.mask_stale_tokens:
                rank_zero_warn(
                    "`SortedBatching(mode='partial')` with `old_logprobs='trainer'` and "
                    "`importance_sampling_mode=None` trains tokens of earlier policies as if the "
                    "newest had drawn them. Leave `old_logprobs` out, or set "
                    "`mask_stale_tokens=True`."
                )
        elif corrected not in (None, "sequence_mask") and module.get("loss_type") != "rloo":
            rank_zero_warn(
                f"`importance_sampling_mode={corrected!r}` has no part in "
                "`SortedBatching(mode='partial')`, where the clipped ratio itself is relative to "
                "the policy that drew a token. Set `old_logprobs='trainer'` to use it."
            )
