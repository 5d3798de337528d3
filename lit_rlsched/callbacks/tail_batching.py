"""RollPacker's tail batching: most rounds do not wait for the longest completions."""

import math
from typing import Any

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.tail_batching import DeferringTailRound, TailRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.schedule import RunFacts, Schedule


class TailBatching(RolloutCallback):
    """End most rounds without waiting for their longest completions.

    RollPacker (arXiv 2509.21009, section 3). A short round begins
    `prompt_ratio * prompts_per_round` prompts, ends once `prompts_per_round` of them are decoded
    and scored, and defers the others. Once that many are deferred, a long round runs the oldest to
    their end. The newest policy draws all completions of an update.

    Bias: updates see prompts with long completions later and together. A deferred prompt is drawn
    again, and a completion that was long may then be short. `completion_ratio` favours short
    completions inside each prompt. `rollout/trained_over_drawn_length` and
    `pool/trained_over_drawn_length` understate the bias. With `reuse_drafts` nothing is drawn
    again, and less bias remains.

    See `docs/explanation/rollpacker.md`.

    Args:
        prompt_ratio: Prompts of a short round, as a multiple of `prompts_per_round`, rounded up.
            With 1, and no `completion_ratio`, the run equals the synchronous one bit for bit.
        completion_ratio: Completions of a fresh prompt, as a multiple of `num_generations`, rounded
            up; the first `num_generations` that finish are kept. The paper uses 1.25. By default
            completions do not race.
        per_domain: Share of each domain (column `domain`) in the update of a short round, such as
            `{"math": 0.5, "code": 0.5}`; prompts race inside their domain. By default all prompts
            race together, which favours domains with short completions.
        reuse_drafts: Keep the tokens of losers as drafts. The long round verifies them and decodes
            on from the kept prefix (block verification, arXiv 2403.10444). Each version that has
            drafts costs a copy of the trainable weights in CPU memory and in checkpoints.
        max_deferrals: Let losers race again in the next round beside fresh prompts, with their
            drafts. A round is long only where a prompt in it has lost this many races (more where
            `prompt_ratio` is above 2). Implies `reuse_drafts`.

    Raises:
        UsageError: an argument is out of range, the data holds too few prompts, or drafts cannot be
            verified because the engine's log-probs are not those of the policy.

    Example::

        Trainer(callbacks=[TailBatching(), MicroGroupSampling(slots=64)])
        Trainer(callbacks=[TailBatching(1.5, max_deferrals=8)])
    """

    sets = "when a round ends"

    def __init__(
        self,
        prompt_ratio: float = 1.25,
        completion_ratio: float | None = None,
        per_domain: dict[str, float] | None = None,
        reuse_drafts: bool = False,
        max_deferrals: int | None = None,
    ) -> None:
        total = 1.0 if per_domain is None else sum(per_domain.values())
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise UsageError(
                f"`TailBatching({per_domain=})`: shares must add up to 1, but add up to {total:g}."
            )
        self.prompt_ratio = prompt_ratio
        self.completion_ratio = completion_ratio
        self.per_domain = per_domain
        self.reuse_drafts = reuse_drafts or max_deferrals is not None
        self.max_deferrals = max_deferrals

    def describe(self) -> str:
        """Return the settings in words."""
        later = "in a long round later" if self.max_deferrals is None else "in the next rounds"
        kept = ", with the tokens they have" if self.reuse_drafts else ""
        return (
            f"a round begins {self.prompt_ratio:g} times its prompts and ends when enough of them "
            f"are ready; the others run {later}{kept}"
        )

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule."""
        if self.reuse_drafts:
            most = self.max_deferrals
            setting = "reuse_drafts=True" if most is None else f"max_deferrals={most}"
            schedule.compares_logprobs[f"`TailBatching({setting})`"] = "drafts are verified by"
        settings: dict[str, Any] = {
            "update_prompts": facts.settings.prompts_per_round,
            "num_generations": facts.settings.num_generations,
            "prompt_ratio": self.prompt_ratio,
            "completion_ratio": self.completion_ratio or 1.0,
            "shares": self.per_domain,
            "reuse_drafts": self.reuse_drafts,
        }
        if self.max_deferrals is None:
            schedule.rule = TailRound(**settings)
        else:
            schedule.rule = DeferringTailRound(max_deferrals=self.max_deferrals, **settings)
