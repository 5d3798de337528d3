"""From drawn rounds to rounds that can be trained on: advantages, metrics, drafts."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.rollout.audit import Harvest
from lit_rlsched.rollout.round_runner import DrawnRound, RoundRunner, Watchers
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.streamed_training import Streaming
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.round import NONFINITE, Round, check_rewards, huge_rewards
from lit_rlsched.training.round_metrics import measure
from lit_rlsched.training.selection import Stop, count_drops, is_uninformative
from lit_rlsched.training.streamed_training import GradientStream
from lit_rlsched.training.update import Update
from lit_rlsched.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How a round is drawn and trained on, beside its rule."""

    update: Update
    """Turns groups into advantages and optimizer steps."""
    streaming: Streaming | None = None
    """When gradients are computed meanwhile."""
    max_num_gen_batches: int = 1
    """Updates' worth of prompts that may be drawn, where a prompt whose completions are all worth
    the same is replaced by another."""


class TrainingRounds:
    """Draws rounds and makes them ready for the optimizer.

    Until all of a round is drawn and has its advantages, its prompts stay in the pool as they were.

    Args:
        runner: Draws them.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self.runner = runner
        self.drafts = Drafts()
        self._blamed: set[str] = set()

    def draw(
        self,
        session: RolloutSession,
        policy: nn.Module,
        rule: RoundRule,
        number: int,
        version: int,
        prepare: Callable[[list[Group]], RoundSettings],
    ) -> tuple[Round, Counter[str]]:
        """Draw the next round, give its completions advantages, and settle what is left of it.

        Args:
            session: Decodes and scores.
            policy: The model that is trained, with the weights of `version`.
            rule: Which prompts the round takes and when it is over.
            number: Rounds before this one.
            version: Policy version it is drawn under.
            prepare: Called with its groups before anything is drawn of them; gives the settings.

        Returns:
            The round, and what is counted of it: `num_tokens`, `num_completions`, `dropped/*` ...
        """
        before, names = session.failures(), session.scorer.names
        update: Update
        stream: GradientStream | None = None

        def watchers(groups: list[Group]) -> Watchers:
            nonlocal update, stream
            settings = prepare(groups)
            update = settings.update
            if settings.streaming is not None:
                stream = self._stream(session, update, settings.streaming, number, version)
            return self._watchers(session, policy, settings, stream)

        drawn = self.runner.run(session, rule, number, version, watchers)
        began = time.perf_counter()
        round = self._round(drawn, update, stream)
        self._blame(huge_rewards(round, names, update.weights))
        round.metrics |= measure(round, drawn.harvest, drawn.planned, names, update)
        round.metrics |= drawn.metrics
        round.metrics["time/score"] = time.perf_counter() - began
        round.metrics |= self.runner.commit(drawn)
        self.drafts.keep(policy, version, self.runner.planner.pool)
        return round, _counts(round, drawn.harvest) + (session.failures() - before)

    def _watchers(
        self,
        session: RolloutSession,
        policy: nn.Module,
        settings: RoundSettings,
        stream: GradientStream | None,
    ) -> Watchers:
        update, batches = settings.update, settings.max_num_gen_batches
        selection, weights = update.selection, update.weights
        return Watchers(
            verify=lambda groups, version: self.drafts.verify(
                groups,
                policy,
                version,
                seed=update.seed,
                salt=self.runner.salt,
                eos_token_ids=session.spec.eos_token_ids,
                micro_batch_tokens=update.micro_batch_tokens,
                forward_context=update.forward_context,
            ),
            stop=Stop(selection, weights) if selection and selection.reward_range else None,
            is_replaced=(lambda group: is_uninformative(group, weights)) if batches > 1 else None,
            max_num_gen_batches=batches,
            advanced=stream.advance if stream else lambda state, trace: None,
        )

    def _stream(
        self,
        session: RolloutSession,
        update: Update,
        streaming: Streaming,
        number: int,
        version: int,
    ) -> GradientStream:
        sequences = self._sequences(update)
        most = self.runner.planner.sampling.max_completion_length
        return GradientStream(
            streaming,
            update,
            number=number,
            version=version,
            divisor=(sequences, sequences * most),
            meanwhile=session.scorer.turn,
        )

    def _round(self, drawn: DrawnRound, update: Update, stream: GradientStream | None) -> Round:
        """The round with an advantage for every completion."""
        round = Round(drawn.number, drawn.version, drawn.harvest.trained, drawn.trace)
        check_rewards(round, update.weights, self._sequences(update))
        streamed = stream.streamed if stream else set()
        rest = [group for group in round.groups if group.id not in streamed]
        update.assign_advantages(Round(round.number, round.version, rest))
        if stream:
            stream.finish(round)
        return round

    def _blame(self, rewards: dict[str, float]) -> None:
        """Say once of each reward function that what it gave cannot be trained on."""
        for name in rewards.keys() - self._blamed:
            self._blamed.add(name)
            rank_zero_warn(
                f"Reward function `{name}` gave {rewards[name]:.3g}: no finite advantage follows "
                f"from it. The completion is left out of the update, and others like it; "
                f"`dropped/{NONFINITE}` counts them. Bound what the function returns."
            )

    def _sequences(self, update: Update) -> int:
        """Completions of an update."""
        return update.rule.update_prompts * self.runner.planner.num_generations

    def leave_run(self) -> int:
        """Begin anew with what waits: the policy versions of a new Trainer are others.

        Returns:
            Tokens that this throws away.
        """
        self.drafts = Drafts()
        return self.runner.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """What goes from one round to the next: primitives and tensors only."""
        return {**self.runner.state_dict(), "drafts": self.drafts.state_dict()}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore; `prompt` finds a prompt by its uid.

        Raises:
            ValueError: the position in the data belongs to other prompts.
        """
        self.runner.load_state_dict(state, prompt)
        self.drafts.load_state_dict(state["drafts"])


def _counts(round: Round, harvest: Harvest) -> Counter[str]:
    """What is counted of a round, but for failures."""
    counts = {
        "num_completions": len(round.completions),
        "num_tokens": sum(map(len, round.samples)),
        "num_discarded_tokens": harvest.discarded_tokens,
        "dropped/stopped": len(harvest.stopped),
        "dropped/nonfinite_draft": harvest.drafts.nonfinite,
    }
    return Counter(counts) + count_drops(round)
