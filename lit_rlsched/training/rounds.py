"""Draw rounds and make them ready for the optimizer."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.rollout.audit import Harvest
from lit_rlsched.rollout.round_runner import RoundRunner, Watchers
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
    """How a round is drawn and trained on, besides its rule."""

    update: Update
    streaming: Streaming | None = None
    """When to compute gradients during the rollout."""
    max_num_gen_batches: int = 1
    """Updates' worth of prompts that a round may draw to replace uninformative groups."""


class TrainingRounds:
    """Draws rounds that are ready for the optimizer.

    A round's prompts stay in the pool unchanged until all of it is drawn and has its advantages.
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
        """Draw the next round, assign its advantages, and settle what is left of it.

        `policy` has the weights of `version`. `prepare` is called with the round's groups before
        they are drawn. The returned counters are `num_tokens`, `num_completions`, `dropped/*` ...
        """
        before, names = session.failures(), session.scorer.names
        planner = self.runner.planner
        sequences = rule.update_prompts * planner.num_generations
        update: Update
        stream: GradientStream | None = None

        def watchers(groups: list[Group]) -> Watchers:
            nonlocal update, stream
            settings = prepare(groups)
            update = settings.update
            if settings.streaming is not None:
                stream = GradientStream(
                    settings.streaming,
                    update,
                    number=number,
                    version=version,
                    divisor=(sequences, sequences * planner.sampling.max_completion_length),
                    meanwhile=session.scorer.turn,
                )
            return self._watchers(session, policy, settings, stream)

        drawn = self.runner.run(session, rule, number, version, watchers)
        began = time.perf_counter()
        round = Round(number, version, drawn.harvest.trained, drawn.trace)
        check_rewards(round, update.weights, sequences)
        streamed = stream.streamed if stream else set()
        rest = [group for group in round.groups if group.id not in streamed]
        update.assign_advantages(Round(number, version, rest))
        if stream:
            stream.finish(round)
        self._blame(huge_rewards(round, names, update.weights))
        round.metrics |= measure(round, drawn.harvest, drawn.planned, names, update)
        round.metrics |= drawn.metrics
        round.metrics["time/advantages"] = time.perf_counter() - began
        round.metrics |= self.runner.commit(drawn)
        self.drafts.keep(policy, version, planner.pool)
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
        self.drafts = Drafts()
        return self.runner.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, primitives and tensors only."""
        return {**self.runner.state_dict(), "drafts": self.drafts.weights}

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore the state; `prompt` finds a prompt by its uid."""
        self.runner.load_state_dict(state, prompt)
        self.drafts.weights = dict(state["drafts"])


def _counts(round: Round, harvest: Harvest) -> Counter[str]:
    counts = {
        "num_completions": len(round.completions),
        "num_tokens": sum(map(len, round.samples)),
        "num_discarded_tokens": harvest.discarded_tokens,
        "dropped/stopped": len(harvest.stopped),
        "dropped/nonfinite_draft": harvest.drafts.nonfinite,
    }
    return Counter(counts) + count_drops(round)
