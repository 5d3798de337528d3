"""The rounds of a run, one after the other, and the position in them.

A round, in order (`_draw`, then `optimizer_steps`):

1. `Pool.plan` takes prompts from the pool and from the data: the rule says which.
2. `TrainerHooks` calls `on_round_start`, and the trainer verifies what older policies have drawn.
3. `Rollout.load_weights` copies the policy's weights to the engine, `Rollout.run` decodes and
   scores until the rule ends the round.
4. `TrainerHooks.finish` assigns advantages; `Pool.commit` keeps what goes on in later rounds.
5. Lightning takes the optimizer steps.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from lightning import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.data.prompts import Prompts
from lit_rlsched.data.rows import load_rows
from lit_rlsched.ranks import Team
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.run.advice import Advice
from lit_rlsched.run.checks import check_trainer
from lit_rlsched.run.fsdp2 import is_sharded
from lit_rlsched.run.interrupts import asked_to_stop, only_ask
from lit_rlsched.run.position import RunPosition
from lit_rlsched.run.round_hooks import TrainerHooks, fire, fire_in_module
from lit_rlsched.run.run_config import describe_runs, shared_config
from lit_rlsched.run.same_ranks import check_same, make_team
from lit_rlsched.run.saving.run_state import check_resumed, check_run_state, restore, run_state
from lit_rlsched.run.startup import Startup, in_own_process
from lit_rlsched.run.switches import class_names, make_schedule
from lit_rlsched.run.trainer import FitSettings, log_now
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.timeline import TRAINER
from lit_rlsched.settings import UsageError
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, RunSettings, Schedule

T = TypeVar("T")


class TrainingRun(RunPosition):
    """Gives out optimizer steps, from a round that is drawn once the last one is trained on."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self._started = False
        self._scored = True
        """Whether completions are scored; False in `predict` if the rows lack columns for it."""
        self._parts: list[OptimizerStep] = []
        """Parts of the round's first step that this rank has accumulated for the leader."""
        self._last: Trainer | None = None
        """Trainer whose policy versions the round and the pool have."""

    def join(self, trainer: Trainer, trains: bool) -> None:
        """Form a team with the Trainer's other processes; its callbacks set the schedule."""
        self._trainer = trainer
        check_trainer(trainer)
        if trainer.world_size > 1:
            self.settings = replace(self.settings, engine=in_own_process(self.settings.engine))
        if trainer.world_size > 1 and dist.is_initialized():  # in an estimate it is not
            self.team = make_team(trainer)
            check_same(self.team.all_gather, shared_config(trainer, self.settings))
        only_ask(trainer, fits=trains)
        module: Any = trainer.lightning_module
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self.facts = RunFacts(
            self.settings,
            self.learner,
            class_names(callbacks),
            trains,
            module.hparams,
            module.automatic_optimization,
            trainer.world_size,
            type(trainer.strategy).__name__ if is_sharded(trainer) else None,
        )
        self.schedule = make_schedule(callbacks, self.facts)

    def read(self, name: str, stage: str) -> None:
        """Read a data set, unless it was read before, and check its columns."""
        data, rewards = self.settings.data[name], self.settings.rewards
        if data is None:
            raise UsageError(
                f"There is nothing to {stage} on. Give `RolloutDataModule({name}_data=...)`."
            )
        if name not in self.rows:
            self.rows[name] = load_rows(data, self.settings.has_objects)
        try:
            rewards.check_columns(self.rows[name], f"{name}_data")
        except ValueError as error:
            if name != "predict":
                raise
            self._scored = False
            rank_zero_warn(f"No rewards are computed: {error}")

    def begin(self) -> None:
        """Read the Trainer's settings, start the clock, and describe the run to W&B."""
        if self._last not in (None, self.trainer):  # policy versions begin again at 0
            self.record.load_state_dict({})
        steps = self.settings.steps_per_epoch
        self.fit_settings = FitSettings(self.trainer, steps, self.record, lambda: self.timeline)
        self.clock.start()
        describe_runs(self.trainer, self.settings.engine)

    def start(self) -> None:
        """Start the session, unless it runs; the module has loaded the policy."""
        if self._started:
            return
        check_resumed(self)
        self._startup = startup = Startup(
            self.facts, self.schedule, self.rows, self.trainer, self.team, self._scored
        )
        self.facts = startup.facts
        if startup.prompts.train:
            self.pool.connect(startup.source)
        self.pool.chooser = self.schedule.chooser
        for reads in (self.schedule.chooser, self.schedule.lengths):
            if reads is not None:
                reads.connect(self.statistics)
        self.lead(self._start_session)
        self._started = True

    def _start_session(self) -> None:
        self.session = self.startup.start(self.advice)

    def held_out(self, stage: str) -> Prompts:
        """Tokenised prompts of `val`, `test` or `predict`; starts the session if it must."""
        # Lightning may ask for the length of a loader after teardown, which must start nothing
        if self._startup is None or stage not in self._startup.prompts.held_out:
            self.start()
        return self.startup.prompts.held_out[stage]

    def close(self) -> None:
        """Close engine and reward workers; safe to call twice."""
        session, self.session, self._started = self.session, None, False
        try:
            if session is not None:
                session.close()
        finally:
            self.settings.rewards.close()  # workers may run although the engine did not start

    def finish(self) -> None:
        """Close the session, give the Trainer its settings back, and discard the schedule."""
        if self.fit_settings is not None:
            self.fit_settings.undo()
        self.clock.stop()
        self.ahead = None
        self.team.close()
        self.team = Team()
        self.close()
        self._scored = True
        self.schedule = Schedule(FullRound(self.settings.prompts_per_round))

    def lead(self, draw: Callable[[], T]) -> T:
        """Run `draw` where the engine is, while the other ranks do their part; see `Team.lead`."""
        tasks: dict[str, Any] = {}
        if not self.team.leads:
            tasks = {
                **self.startup.policy_reader.tasks,
                "round_start": partial(fire_in_module, self.trainer, "on_round_start"),
                "score": self.update.score,
                "accumulate": lambda *of: self._parts.append(self.update.accumulate_part(*of)),
            }
        return self.team.lead(draw, tasks)

    def optimizer_steps(self) -> Iterator[OptimizerStep]:
        """Yield the steps of the next round, or the remaining ones of a resumed round."""
        self.start()  # tokenises the prompts that a checkpoint names
        self.arrive()
        if self.round_is_over:
            self.end_round()
        round = self.current or self._roll_out()
        for index in range(self.cursor(), self._steps_taken):
            if self.team.size > 1 and any(self.team.all_gather(asked_to_stop(self.trainer))):
                raise SIGTERMException  # all ranks together
            step = self.update.step(round, index)
            if not len(step) and self.trainer.lightning_module.automatic_optimization:
                round.empty_steps += 1  # Lightning gets no micro-batch and counts no step
            yield step

    def arrive(self) -> None:
        """Restore the checkpoint, or leave an earlier Trainer's run, if there is one."""
        if self.resumed is not None:
            restore(self, self.resumed)
            self.resumed = None
        elif self._last is not None and self._last is not self._trainer:
            self._leave(self._last)
        self._last = self.trainer

    def _roll_out(self) -> Round:
        """Draw a round, log its metrics and call the hooks."""
        trainer, self._parts = self.trainer, []
        round, self.counters = self.lead(self._draw)
        if not self.team.leads:
            self._take(round)
            round.accumulated = self._parts
            fire_in_module(trainer, "on_round_end", round)
        if self.schedule.ahead:
            self.lead(self._draw_ahead)
        metrics = self.position | round.metrics
        self.record.add_metrics(metrics)  # callbacks may have added some
        log_now(trainer, metrics)
        return round

    def _draw(self) -> tuple[Round, Counter[str]]:
        """Draw a round on the rank that has the engine, or take what was drawn ahead.

            engine   [ round n ......... ]                    [ round n + 1 ..... ]
            trainer  [ `_draw` waits     ][ steps of round n ][ `_draw` waits     ]

        With `AsyncRollout` (`_draw_ahead`):

            engine   [ round n ......... ][ round n + 1 ................. ][ round n + 2 ...
            trainer  [ `_draw` waits     ][ steps of round n ][ `_draw`   ][ steps of round n + 1

        The weights at the beginning of a rollout and seeds decide what is drawn, timing does not.
        """
        self._end_ahead()
        assert self.session is not None
        trainer, rule, timeline = self.trainer, self.schedule.rule, self.session.timeline
        hooks, result, waited_until = TrainerHooks(self, self.num_rounds), self.next, None
        if result is None:
            rollout = self._begin(hooks)
            rollout.run()
            result, waited_until = rollout.result(), rollout.ended
        timeline.mark(waited_until)
        began = timeline.now()
        with timeline.doing("advantages", TRAINER):
            round, counts = hooks.finish(result)
        round.metrics["time/advantages"] = timeline.now() - began
        round.metrics |= self.pool.commit(result, rule)
        self.next = None
        if rule.verifies_from is not None:
            self.drafts.keep(self.startup.policy, hooks.version, self.pool)
        self._take(round)
        self.counters += counts
        round.metrics |= dict.fromkeys(self.settings.rewards.counters(), 0) | self.counters
        limit, in_groups = self.settings.sampling.max_completion_length, self.learner.needs_group
        for text in self.advice.of_round(round, self.record, limit, in_groups):
            rank_zero_warn(text)
        timeline.lap()
        fire(trainer, "on_round_end", round)
        return round, self.counters

    def _draw_ahead(self) -> None:
        """Begin to draw the next round beside the update of the current one."""
        hooks = TrainerHooks(self, self.num_rounds + 1, beside=True)
        if self._rounds_left(hooks.number) == 0:
            return
        drafts, rule = self.drafts, self.schedule.rule
        if rule.verifies_from is not None and hooks.version not in drafts.weights:
            drafts.keep_version(self.startup.policy, hooks.version)
        # another round may have its policy version and prompts
        self.ahead = self._begin(hooks, f"{self.pool.seed_domain} ahead".strip())
        self.ahead.run_beside()

    def _begin(self, hooks: TrainerHooks, seed_domain: str | None = None) -> Rollout:
        """Plan a round, and load the weights that draw it."""
        assert self.session is not None
        rule, pool = self.schedule.rule, self.pool
        groups = pool.plan(rule, self._rounds_left(hooks.number))
        domain = pool.seed_domain if seed_domain is None else seed_domain
        rollout = Rollout(self.session, groups, hooks.version, rule, hooks, domain)
        rollout.load_weights()
        return rollout

    def _rounds_left(self, number: int) -> int | None:
        """Rounds until training ends, with the one of this number."""
        left = self.fit_settings.rounds_left if self.fit_settings is not None else 1
        return None if left is None else left - (number - self.num_rounds)

    def _end_ahead(self) -> None:
        """Wait until the rollout beside the update has ended, if there is one."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        began = time.perf_counter()
        ahead.wait()
        ended = time.perf_counter()
        self.next = ahead.result()
        took = self.next.metrics["time/rollout"]
        self.next.metrics |= {
            "async_rollout/rollout_seconds": took,
            "async_rollout/wait_seconds": ended - began,
            "async_rollout/engine_wait_seconds": max(0.0, ended - ahead.began - took),
        }

    def wait_for_rollout(self) -> None:
        """Wait for the rollout beside the update, on all ranks."""
        if self.schedule.ahead:
            self.lead(self._end_ahead)

    def _take(self, round: Round) -> None:
        self.current = round
        self.record.add_round(round)

    def _leave(self, trainer: Trainer) -> None:
        """Keep the prompts of another Trainer's pool, and drop its draws that were not trained on.

        The new Trainer counts policy versions from 0.
        """
        if self.current is not None:
            self.counters += self.untrained(self.cursor(trainer), "new_trainer")
            self.num_rounds += 1
        self.current, self.advice = None, Advice()
        self.drop_next()
        self.drafts = Drafts()
        self.counters["num_discarded_tokens"] += self.pool.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """State of the run, as primitives and tensors."""
        self._end_ahead()
        return run_state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the state of a checkpoint, and keep it until its prompts are tokenised."""
        check_run_state(self, state)
        self.resumed = state
