"""RollPacker's tail batching: most rounds do not wait for the longest completions."""

import math

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.tail_batching import TailRound
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
    `pool/trained_over_drawn_length` understate the bias. `RolloutWindow(overtake=2)` draws nothing
    again, and is faster.

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

    Raises:
        UsageError: an argument is out of range, or the data holds too few prompts.

    Example::

        Trainer(callbacks=[TailBatching(), MicroGroupSampling(slots=64)])
    """

    sets = "when a round ends"

    def __init__(
        self,
        prompt_ratio: float = 1.25,
        completion_ratio: float | None = None,
        per_domain: dict[str, float] | None = None,
    ) -> None:
        total = 1.0 if per_domain is None else sum(per_domain.values())
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise UsageError(
                f"`TailBatching({per_domain=})`: shares must add up to 1, but add up to {total:g}."
            )
        self.prompt_ratio = prompt_ratio
        self.completion_ratio = completion_ratio
        self.per_domain = per_domain

    def describe(self) -> str:
        """Return the settings in words."""
        return (
            f"a round begins {self.prompt_ratio:g} times its prompts and ends when enough of them "
            "are ready; the others run in a long round later"
        )

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule."""
        schedule.rule = TailRound(
            facts.settings.prompts_per_round,
            facts.settings.num_generations,
            self.prompt_ratio,
            self.completion_ratio or 1.0,
            shares=self.per_domain,
        )
