"""Draw rounds and make them ready for the optimizer."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.rollout.audit import Harvest
from lit_rlsched.rollout.round_runner import RoundRunner
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.hooks import Drawing, TrainerHooks
from lit_rlsched.training.overlap import Overlap
from lit_rlsched.training.round import (
    NONFINITE,
    Round,
    check_rewards,
    drop_stale,
    huge_rewards,
)
from lit_rlsched.training.round_metrics import measure
from lit_rlsched.training.selection import count_drops
from lit_rlsched.types import Prompt


class TrainingRounds:
    """Draws rounds that are ready for the optimizer.

    A round's prompts stay in the pool unchanged until all of it is drawn and has its advantages.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self.runner = runner
        self._blamed: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        """Begin without kept weights and without a next round."""
        self.drafts = Drafts()
        self.overlap = Overlap(self.runner, self.drafts)

    def draw(self, how: Drawing) -> tuple[Round, Counter[str]]:
        """Draw the next round, assign its advantages, and settle the rest of it.

        A round that was drawn ahead is not drawn again. The returned counters are `num_tokens`,
        `num_completions`, `dropped/*` ...
        """
        planner = self.runner.planner
        sequences = how.rule.update_prompts * planner.num_generations
        drawn, ahead = self.overlap.take()
        stream, rollout_ended = None, None
        if drawn is None:
            most = sequences, sequences * planner.sampling.max_completion_length
            hooks = TrainerHooks(how, self.drafts, self.runner.salt, most)
            drawn = self.runner.run(how.session, how.rule, how.number, how.version, hooks)
            stream, rollout_ended = hooks.stream, how.session.rollout_ended
        timeline = how.session.timeline
        timeline.mark(rollout_ended)
        update, names = how.update, how.session.scorer.names
        began = timeline.now()
        round = Round(how.number, how.version, drawn.harvest.trained, drawn.trace)
        check_rewards(round, update.weights, sequences)
        drop_stale(round, how.rule.max_staleness)
        if update.needs_old_logprobs:
            self.drafts.give_old_logprobs(round.completions, round.version)
        streamed = stream.streamed if stream else set()
        rest = [group for group in round.groups if group.id not in streamed]
        update.assign_advantages(Round(how.number, how.version, rest))
        if stream:
            stream.finish(round)
        self._blame(huge_rewards(round, names, update.weights))
        round.metrics |= measure(round, drawn.harvest, drawn.planned, names, update)
        round.metrics |= drawn.metrics | ahead
        timeline.add(TRAINER, "advantages", began, timeline.now())
        round.metrics["time/advantages"] = timeline.now() - began
        round.metrics |= self.runner.commit(drawn)
        self.overlap.clear()
        if how.rule.verifies_from is not None:
            self.drafts.keep(how.policy, how.version, planner.pool)
        return round, _counts(round, drawn.harvest) + drawn.failures

    def draw_ahead(self, how: Drawing) -> None:
        """Begin to draw the round after the current one; see `Overlap.ahead`."""
        self.overlap.ahead(how, TrainerHooks(how, self.drafts, self.runner.salt))

    def _blame(self, rewards: dict[str, float]) -> None:
        """Warn once about each reward function whose scores cannot be trained on."""
        for name in rewards.keys() - self._blamed:
            self._blamed.add(name)
            rank_zero_warn(
                f"Reward function `{name}` gave {rewards[name]:.3g}, from which no finite "
                f"advantage can be computed. This completion and others like it are left out of "
                f"the update and counted in `dropped/{NONFINITE}`. Bound what the function returns."
            )

    def leave_run(self) -> int:
        """Restart the pool for a new Trainer's policy versions; return the discarded tokens."""
        lost = self.overlap.tokens
        self._forget()
        return lost + self.runner.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, primitives and tensors only."""
        self.overlap.wait()
        return {
            **self.runner.state_dict(),
            "drafts": self.drafts.weights,
            "next": self.overlap.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], rule: RoundRule, prompt: Callable[[str], Prompt]
    ) -> None:
        """Restore the state; `prompt` finds a prompt by its uid."""
        self.runner.load_state_dict(state, prompt)
        self._forget()
        self.drafts.weights = dict(state["drafts"])
        self.overlap.load_state_dict(state["next"], rule, prompt)


def _counts(round: Round, harvest: Harvest) -> Counter[str]:
    counts = {
        "num_completions": len(round.completions),
        "num_tokens": sum(map(len, round.samples)),
        "num_discarded_tokens": harvest.discarded_tokens,
        "dropped/stopped": len(harvest.stopped),
        "dropped/nonfinite_draft": harvest.drafts.nonfinite,
        "dropped/lost_draft": harvest.drafts.lost,
    }
    return Counter(counts) + count_drops(round)
