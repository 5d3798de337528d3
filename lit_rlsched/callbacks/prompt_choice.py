"""Chooses the prompts of a round by what is known of them, instead of in the data's order."""

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.prompt_choice import Chooser, Rule
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, Schedule


class PromptChoice(RolloutCallback):
    """Draw the prompts that are most likely to teach.

    If all completions of a prompt are right, or all are wrong, it has no gradient. `skip_solved`
    takes prompts at random and passes over one whose last k groups had equal rewards with a
    probability of `1 - 0.5 ** k` (GRESO, arXiv 2506.02177, equation 4, with a constant base).
    `thompson` draws a success rate of each prompt from what is known of it, a Beta distribution
    with decaying counts (`PromptStatistics`), and takes the prompts nearest to `target` (MoPPS,
    arXiv 2507.04632, section 3). If rewards are not only 0 and 1, it takes those with the largest
    standard deviation, drawn in the same way, and `target` has no effect.

    A share `explore` of the prompts comes in the data's order, so every one of N prompts is drawn
    within `ceil(N / (explore * prompts_per_round))` rounds. Data are always read whole before a
    run, streams too, so the choice is among all prompts. With `TailBatching(per_domain=...)` it is
    among those of a domain. `DynamicSampling` beside it replaces what has no signal.

    Bias: prompts of medium difficulty are trained on more often than the data contain them, so the
    expected gradient is that of another mixture of prompts, which changes with the policy. Given a
    prompt, nothing changes. A group's id says how its prompt was drawn: `UID@c40` was chosen,
    `UID@0` came in the data's order. `prompt_choice/*` show what is chosen.

    See `docs/explanation/prompts.md`.

    Args:
        rule: `skip_solved`, `thompson`, or `uniform`: the data's order, only measured.
        target: Success rate that `thompson` looks for.
        explore: Share of prompts in the data's order.

    Raises:
        UsageError: an argument is out of range, or the rule is `skip_solved` and advantages are
            not relative to the prompt's other completions.

    Example::

        Trainer(callbacks=[PromptChoice()])
    """

    sets = "which prompts are drawn"

    def __init__(
        self, rule: Rule = "skip_solved", target: float = 0.5, explore: float = 0.1
    ) -> None:
        self.rule, self.target, self.explore = rule, target, explore
        self._chooser: Chooser | None = None

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set what chooses."""
        self._chooser = Chooser(self.rule, self.target, self.explore, facts.settings.seed)
        schedule.chooser = self._chooser

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log how the round's prompts were chosen, and how many of all teach nothing."""
        if (chooser := self._chooser) is None:
            return
        chosen = [group.id.rpartition("@")[2].startswith("c") for group in round.groups]
        round.metrics["prompt_choice/explored_share"] = 1 - sum(chosen) / max(1, len(chosen))
        known = chooser.statistics.prompts
        round.metrics["prompt_choice/known_prompts"] = len(known)
        if known:
            equal = (chooser.statistics.equal(known) > 0).mean()
            round.metrics["prompt_choice/known_zero_std"] = float(equal)


class PromptBudget(RolloutCallback):
    """Draw the other completions of a prompt only if its first ones differ.

    Each prompt begins `pilot` of its `num_generations` completions. Once they are scored, it begins
    the others if their rewards differ (Pilot-Commit, arXiv 2605.26606). Seeds are by index, so
    these are the completions that it would have had anyway. Nothing is drawn in place of those that
    are spared: a round has as many prompts and fewer completions.

    Bias: a group is trained on only if its first `pilot` rewards differ, which favours prompts of
    medium difficulty more than plain GRPO does, and within such a group the first completions
    differ more than others. `docs/explanation/bias.md` has the size of both.

    See `docs/explanation/prompts.md`.

    Args:
        pilot: Completions of a prompt that are drawn first.

    Raises:
        UsageError: `pilot` is less than 2, as one reward cannot differ, or not below
            `num_generations`; a rule ends rounds early, `DownSampling(early_stop=True)` ends
            groups; or advantages are not relative to the prompt's other completions.

    Example::

        Trainer(callbacks=[PromptBudget(pilot=4)])
    """

    sets = "how many completions a prompt gets"

    def __init__(self, pilot: int = 4) -> None:
        self.pilot = pilot

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the number."""
        schedule.pilot = self.pilot

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log the share of prompts that got all completions."""
        whole = [len(group.completions) > self.pilot for group in round.groups]
        round.metrics["prompt_budget/whole_share"] = sum(whole) / max(1, len(whole))
