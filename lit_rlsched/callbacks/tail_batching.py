"""RollPacker's tail batching: most rounds do not wait for the longest completions."""

import math
from typing import Any, get_args

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.checks import check_logprobs
from lit_rlsched.scheduling.racing import Race, Reuse
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.scheduling.tail_deferring import DeferringTailRound
from lit_rlsched.settings import check_choice, check_count


class TailBatching(RolloutCallback):
    """Race more prompts than a round trains on, and run the losers together in a round of theirs.

    RollPacker (arXiv 2509.21009, section 3). A short round begins `prompt_ratio *
    prompts_per_round` fresh prompts and is over once `prompts_per_round` of them have all their
    completions and scores; the others are put off, without their tokens. Once `prompts_per_round`
    prompts have been put off, a long round runs the oldest of them to their end, and nothing
    else: with the default ratio every fifth round. So each prompt is trained on once in each pass
    over the data, each update has as many completions as without this callback, and all of them
    are of the newest policy.

    The race includes the reward: a prompt is ready when it is scored. Where a round could be over
    but for scores, it waits for them, five seconds in all, before it decodes on. So what wins does
    not depend on how long reward functions take, unless they take longer than that.

    What the method does to what is learned. Updates see prompts in another order, those with long
    completions later and together. What lost is drawn anew under another policy, and a completion
    that was long the first time may then be short: what is trained on is a little shorter than
    what was drawn. With `race="completion"`, the paper's, the first `num_generations` of more are
    kept, inside each prompt: short completions are then favoured at the cost of long ones
    directly. `rollout/trained_over_drawn_length` and `pool/trained_over_drawn_length`, from one
    long round to the next, say by how much at least. Hence the default, `race="prompt"`.

    With `reuse="drafts"` what lost is not drawn anew: its tokens are kept as a draft, and the long
    round begins with a forward pass of the trainer over all drafts. By the ratio of `p`, the policy
    now, to `q`, the one that drew it, a prefix of each is kept and a token drawn after it, and the
    completion goes on from there (exact speculative sampling, by prefixes: Sun et al., arXiv
    2403.10444). Given that a draft is a draw of `q`, the completion is one of `p`, tokens and
    log-probs. Drafts are those that lost, the long ones; but each prompt has one draw, won or lost,
    so that over all of them the law is that of one draw a prompt, whereas a redraw loses the long
    ones. What remains: the order of prompts; with `race="completion"` the preference for the short
    in the prompts that win; that what lost did so under an earlier policy; and the rounding between
    the engine, whose log-probs stand for `q`, and the trainer, which also shortens what is kept.

    With `max_deferrals=8` beside it losers do not wait for a long round: they go on, as far as
    their drafts are kept, in every round until they win, beside as many fresh prompts as are
    lacking. So all rounds are about as long as a short one. Only where a prompt has lost
    `max_deferrals` races is a round long: it does not end before all that waited are scored. So
    nobody starves, however little is kept. The price is that all that waits is verified in each
    round: it pays where engines run out of completions to decode, not where one is busy with
    hundreds. And whatever is cut of a draft gets another chance to be short in each race.

    For each version that has drafts a copy of the trainable weights (of the adapters, with LoRA) is
    in the CPU's memory and in checkpoints: one for each short round between two long ones, and one
    more where prompts wait on; a single one with `max_deferrals`. Each round that has some logs
    `drafts/tokens`, `drafts/accepted_tokens`, `drafts/accepted_share`, `drafts/completed` (kept as
    a whole), `drafts/distance` (mean total variation distance of the two policies' next token) and
    `time/drafts`; and, since the last one, `pool/recovered_token_share`: what drafts recovered of
    all that would have been thrown away. Until then tokens of drafts count as useful. A draft with
    a log-prob that is not finite is dropped and drawn anew, and counted in
    `dropped/nonfinite_draft`.

    Each round logs `tail_batching/long_round` (0 or 1), `rollout/pool_prompts` (what waits for a
    later one), `rollout/discarded_tokens`, `rollout/useful_token_share` and
    `rollout/score_wait_seconds`. Hooks: `on_completion_end` and `on_group_end` also fire for what
    is scored and then put off.

    Args:
        prompt_ratio: Prompts of a short round, as a multiple of `prompts_per_round`, rounded up.
            With 1, and `race="prompt"`, the run is the synchronous one, bit for bit.
        completion_ratio: With `race="completion"`: completions of a fresh prompt that are begun,
            as a multiple of `num_generations`, rounded up.
        race: Whether whole prompts race, or also the completions of each prompt.
        reuse: `drafts` keeps what losers had drawn for a later round to verify; by default it is
            thrown away.
        per_domain: Share of each domain in the update of a short round, such as `{"math": 0.5,
            "code": 0.5}`: prompts race inside their domain, which their column `domain` names, for
            its quota of `prompts_per_round`. Rounds of what lost take the oldest, of any domain.
            By default all race together, and short rounds have few prompts of a domain whose
            completions are long.
        max_deferrals: With `reuse="drafts"`: losers go on beside fresh prompts, and none loses more
            than so many races (where `prompt_ratio` is 2 or less). By default they wait for a long
            round.

    Raises:
        ValueError: an argument is out of range, or the data holds too few prompts, or the log-probs
            that drafts are verified with are not those of the policy.

    Example::

        Trainer(callbacks=[TailBatching(), MicroGroupSampling(slots=64)])
        Trainer(callbacks=[TailBatching(1.5, reuse="drafts", max_deferrals=8)])
    """

    sets = "when a round ends"

    def __init__(
        self,
        prompt_ratio: float = 1.25,
        completion_ratio: float = 1.25,
        race: Race = "prompt",
        reuse: Reuse | None = None,
        per_domain: dict[str, float] | None = None,
        max_deferrals: int | None = None,
    ) -> None:
        for name, value in (("prompt_ratio", prompt_ratio), ("completion_ratio", completion_ratio)):
            if not isinstance(value, int | float) or not 1 <= value < math.inf:
                raise ValueError(
                    f"`TailBatching({name}={value!r})`: must be 1 (no race) or more, such as 1.25: "
                    "what an update needs has to be begun."
                )
        check_choice("TailBatching", "race", race, get_args(Race))
        if reuse not in (None, *get_args(Reuse)):
            raise ValueError(f"`TailBatching({reuse=})` is unknown. Use 'drafts', or leave it out.")
        if per_domain is not None:
            _check_shares(per_domain)
        if max_deferrals is not None:
            _check_deferrals(max_deferrals, reuse)
        self.prompt_ratio = prompt_ratio
        self.completion_ratio = completion_ratio
        self.race: Race = race
        self.reuse: Reuse | None = reuse
        self.per_domain = per_domain
        self.max_deferrals = max_deferrals

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the rule into the schedule."""
        schedule, run = rollout_schedule(trainer, self)
        if self.reuse:
            who, what = "`TailBatching(reuse='drafts')`", "drafts are verified by"
            check_logprobs(who, run.engine, run.sampling, what)
        settings: dict[str, Any] = {
            "update_prompts": run.prompts_per_round,
            "num_generations": run.num_generations,
            "prompt_ratio": self.prompt_ratio,
            "completion_ratio": self.completion_ratio,
            "race": self.race,
            "shares": self.per_domain,
        }
        if self.max_deferrals is None:
            schedule.rule = TailRound(reuse=self.reuse, **settings)
        else:
            schedule.rule = DeferringTailRound(max_deferrals=self.max_deferrals, **settings)


def _check_deferrals(max_deferrals: int, reuse: Reuse | None) -> None:
    """Refuse races that a prompt would never win, or only once it is drawn short."""
    fix = "Who races may lose; leave it out for long rounds."
    check_count("TailBatching", "max_deferrals", max_deferrals, 1, fix)
    if reuse is None:
        raise ValueError(
            f"`TailBatching({max_deferrals=})` without `reuse='drafts'`: what lost would be drawn "
            "anew until it is short enough to win. Add `reuse='drafts'`, or leave `max_deferrals` "
            "out: long rounds run the losers to their end."
        )


def _check_shares(per_domain: dict[str, float]) -> None:
    """Refuse shares that do not make up an update."""
    shares = per_domain.values()
    if not all(isinstance(share, int | float) and share > 0 for share in shares):
        raise ValueError(f"`TailBatching({per_domain=})`: each share must be above 0.")
    if not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ValueError(
            f"`TailBatching({per_domain=})`: shares must add up to 1, and these add up to "
            f"{sum(shares):g}."
        )
