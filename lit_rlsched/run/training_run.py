"""The rounds of a run, one after the other, and the position in them."""

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

from lit_rlsched import __version__
from lit_rlsched.data.prompts import Prompts
from lit_rlsched.data.rows import RowTable, load_rows, name_of
from lit_rlsched.ranks import Team
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.round_runner import RoundRunner
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.run.advice import Advice
from lit_rlsched.run.checks import check_trainer
from lit_rlsched.run.fsdp2 import is_sharded
from lit_rlsched.run.interrupts import asked_to_stop, only_ask
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.run_config import describe_runs, shared_config
from lit_rlsched.run.same_ranks import check_same, check_same_checkpoint, make_team
from lit_rlsched.run.saving.checkpoints import CheckpointError
from lit_rlsched.run.saving.resuming import (
    FORMAT,
    SAME_ON_RESUME,
    check_drawn,
    check_state,
    check_whole_groups,
)
from lit_rlsched.run.startup import Startup, in_own_process
from lit_rlsched.run.switches import class_names, make_schedule
from lit_rlsched.run.trainer import Clock, FitSettings, fire, fire_in_module, log_now
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.timeline import Timeline
from lit_rlsched.settings import UsageError
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.rounds import TrainerHooks, TrainingRounds
from lit_rlsched.training.schedule import RunFacts, RunSettings, Schedule
from lit_rlsched.training.update import Update

T = TypeVar("T")


class TrainingRun:
    """Gives out optimizer steps, from a round that is drawn once the last one is trained on.

    Everything a checkpoint holds of a run besides weights and optimizer is here. The position in a
    round follows from the Trainer's global step, so a checkpoint has every step that was taken.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        """What the user has set; with several ranks the engine is in a process of its own."""
        self.schedule = Schedule(FullRound(settings.prompts_per_round))
        """Everything that callbacks have set for this run."""
        self.facts = RunFacts(settings)
        """What callbacks may know of the run when they set the schedule."""
        planner = RoundPlanner(RolloutBuffer(), settings.sampling, settings.num_generations)
        self.rounds = TrainingRounds(RoundRunner(planner))
        """Draws the rounds and holds the pool."""
        self.rows: dict[str, RowTable] = {}
        """Data sets read so far, by stage."""
        self.session: RolloutSession | None = None
        """Engine, rewards and controller while they run, on rank 0."""
        self.fit_settings: FitSettings | None = None
        """Settings of the Trainer during `fit`."""
        self.current: Round | None = None
        """The round that is being trained on."""
        self.num_rounds = 0
        """Number of rounds ended."""
        self.counters: Counter[str] = Counter()
        """Totals since the run began: `num_tokens`, `num_completions`, `dropped/*`."""
        self.clock = Clock()
        """Time in `fit`."""
        self.record = RunRecord()
        """What was measured so far."""
        self.advice = Advice()
        """Warnings given so far."""
        self.resumed: dict[str, Any] | None = None
        """State of a checkpoint, until the prompts that it names are tokenised."""
        self.team = Team()
        """The Trainer's processes."""
        self._trainer: Trainer | None = None
        self._startup: Startup | None = None
        self._started = False
        self._scored = True
        """Whether completions are scored; False in `predict` if the rows lack columns for it."""
        self._parts: list[OptimizerStep] = []
        """Parts of the round's first step that this rank has accumulated for the leader."""
        self._start = 0
        self._empty_steps = 0
        self._last: Trainer | None = None
        """Trainer whose policy versions the round and the pool have."""

    @property
    def trainer(self) -> Trainer:
        """The Trainer that the run has joined."""
        assert self._trainer is not None, "not joined"
        return self._trainer

    @property
    def startup(self) -> Startup:
        """Prompts, policy and engine settings of the last start."""
        assert self._startup is not None, "not started"
        return self._startup

    @property
    def pool(self) -> RolloutBuffer:
        """Groups drawn from the data and not yet trained on."""
        return self.rounds.runner.planner.pool

    @property
    def learner(self) -> Learner:
        """The module, or a `PlainLearner` for a module that is not a `Learner`."""
        module = self.trainer.lightning_module
        return module if isinstance(module, Learner) else PlainLearner()

    @property
    def update(self) -> Update:
        """How a round becomes optimizer steps, as callbacks have set it so far."""
        return Update(
            self.settings,
            self.schedule,
            self.learner,
            self.rounds.runner.runs,
            self.trainer.precision_plugin.forward_context,
            self.team,
        )

    @property
    def _steps_taken(self) -> int:
        """Number of optimizer steps the Trainer takes per round; its limits may cut some."""
        limits = self.fit_settings
        return self.settings.steps_per_epoch if limits is None else limits.steps

    @property
    def round_is_over(self) -> bool:
        """Whether the Trainer has taken all its steps of the current round."""
        return self.current is not None and self._cursor() >= self._steps_taken

    @property
    def position(self) -> dict[str, float]:
        """Rounds, tokens and seconds so far: x-axes on which loggers can show every metric."""
        return {
            "rollout/round": self.rounds_over,
            "num_tokens": self.counters["num_tokens"],
            "time/total": self.clock.seconds,
        }

    @property
    def rounds_over(self) -> int:
        """Number of rounds whose steps the Trainer has all taken."""
        if self.resumed is not None:
            return int(self.resumed["num_rounds"])
        return self.num_rounds + self.round_is_over

    def _cursor(self, trainer: Trainer | None = None) -> int:
        """Number of steps taken of the current round."""
        return (trainer or self.trainer).global_step - self._start + self._empty_steps

    @property
    def timeline(self) -> Timeline | None:
        """When trainer and engines work, on rank 0 while the session runs."""
        return None if self.session is None else self.session.timeline

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

    @property
    def _same(self) -> dict[str, Any]:
        return {name: getattr(self.settings, name) for name in SAME_ON_RESUME}

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
        self.check_resumed()
        self._startup = startup = Startup(
            self.facts, self.schedule, self.rows, self.trainer, self.team, self._scored
        )
        self.facts = startup.facts
        if startup.prompts.train:
            self.rounds.runner.planner.connect(startup.source)
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
        self.rounds.ahead = None
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
        for index in range(self._cursor(), self._steps_taken):
            if self.team.size > 1 and any(self.team.all_gather(asked_to_stop(self.trainer))):
                raise SIGTERMException  # all ranks together
            step = self.update.step(round, index)
            if not len(step) and self.trainer.lightning_module.automatic_optimization:
                self._empty_steps += 1  # Lightning gets no micro-batch and counts no step
            yield step

    def arrive(self) -> None:
        """Restore the checkpoint, or leave an earlier Trainer's run, if there is one."""
        if self.resumed is not None:
            self._restore(self.resumed)
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
            self.lead(lambda: self.rounds.draw_ahead(self.drawing(self.num_rounds + 1)))
        metrics = self.position | round.metrics
        self.record.add_metrics(metrics)  # callbacks may have added some
        log_now(trainer, metrics)
        return round

    def _draw(self) -> tuple[Round, Counter[str]]:
        """Draw a round, on the rank that has the engine."""
        settings, trainer = self.settings, self.trainer
        round, counts = self.rounds.draw(self.drawing(self.num_rounds))
        self._take(round)
        self.counters += counts
        round.metrics |= dict.fromkeys(settings.rewards.counters(), 0) | self.counters
        limit, in_groups = settings.sampling.max_completion_length, self.learner.needs_group
        for text in self.advice.of_round(round, self.record, limit, in_groups):
            rank_zero_warn(text)
        assert self.timeline is not None
        self.timeline.lap()
        fire(trainer, "on_round_end", round)
        return round, self.counters

    def _take(self, round: Round) -> None:
        self.current, self._start, self._empty_steps = round, round.version, 0
        self.record.add_round(round)

    def wait_for_rollout(self) -> None:
        """Wait for the rollout beside the update, on all ranks."""
        if self.schedule.ahead:
            self.lead(self.rounds.wait)

    def drawing(self, number: int) -> TrainerHooks:
        """Return what draws a round under the current weights."""
        trainer, limits = self.trainer, self.fit_settings
        assert self.session is not None
        left = limits.rounds_left if limits is not None else 1
        if left is not None:
            left -= number - self.num_rounds
        return TrainerHooks(
            self.session,
            self.startup.policy,
            self.update,
            self.rounds.drafts,
            self.rounds.runner.salt,
            number,
            trainer.global_step,
            partial(self.team.call, "round_start", partial(fire, trainer, "on_round_start")),
            left,
        )

    def end_round(self) -> dict[str, float]:
        """End the current round; return the totals of what `limit_train_batches` has dropped."""
        left = self._untrained(self._cursor(), "limit_train_batches")
        self.counters += left
        self.num_rounds += 1
        self.current = None
        return {name: self.counters[name] for name in left}

    def _untrained(self, taken: int, why: str) -> Counter[str]:
        """Count the completions of the current round in steps after the first `taken`."""
        assert self.current is not None
        steps = range(taken, self.settings.steps_per_round)
        dropped = sum(len(self.update.step(self.current, i).samples) for i in steps)
        return Counter({f"dropped/{why}": dropped} if dropped else {})

    def _leave(self, trainer: Trainer) -> None:
        """Keep the prompts of another Trainer's pool, and drop its draws that were not trained on.

        The new Trainer counts policy versions from 0.
        """
        if self.current is not None:
            self.counters += self._untrained(self._cursor(trainer), "new_trainer")
            self.num_rounds += 1
        self.current, self._start, self._empty_steps = None, 0, 0
        self.advice = Advice()
        self.counters["num_discarded_tokens"] += self.rounds.leave_run()

    def state_dict(self) -> dict[str, Any]:
        """State of the run, as primitives and tensors."""
        if self.resumed is not None:  # at most a validation since it was loaded
            return self.resumed | {"record": self.record.state_dict()}
        over, counters, saved = self.round_is_over, self.counters, None
        if over:
            counters = counters + self._untrained(self._cursor(), "limit_train_batches")
        elif self.current is not None:
            at = {"start": self._start, "empty_steps": self._empty_steps}
            saved = self.current.state_dict() | at
        return {
            **{"format": FORMAT, "version": __version__, "unix_seconds": time.time()},
            "settings": self._same,
            "reward_funcs": list(self.settings.rewards.names),
            "train_data": name_of(self.settings.data["train"]),
            **self.rounds.state_dict(),
            "num_rounds": self.num_rounds + over,
            "counters": dict(counters),
            "seconds": self.clock.seconds,
            "record": self.record.state_dict(),
            "advice": self.advice.state_dict(),
            "round": saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the state of a checkpoint, and keep it until its prompts are tokenised."""
        settings = self.settings
        check_state(state, self._same)
        drawn = [state["pool"], *([state["round"]["groups"]] if state["round"] else [])]
        if ahead := state["next"]:
            drawn.append(ahead["trained"])
        limit = settings.sampling.max_completion_length
        check_drawn(drawn, state["reward_funcs"], settings.rewards.names, limit)
        self.clock.before = state.get("seconds", 0.0)
        self.record.load_state_dict(state.get("record", {}))
        self.advice.load_state_dict(state.get("advice", {}))
        self.resumed = state

    def check_resumed(self) -> None:
        """Refuse a checkpoint without a run, and processes that go on from other ones."""
        trainer, path = self.trainer, self.trainer.ckpt_path
        check_same_checkpoint(self.team, path)
        if self.resumed is None and trainer.state.fn == "fit" and path is not None:
            name = type(trainer.datamodule).__qualname__  # type: ignore[attr-defined]
            raise CheckpointError(
                f"`{path}` has no state of `{name}`: no prompts, pool, round or counters to "
                "resume. Resume from a checkpoint of the whole run, or start a new run without "
                "`ckpt_path`."
            )

    def _restore(self, state: dict[str, Any]) -> None:
        startup, schedule = self.startup, self.schedule
        prompt_of_uid = startup.prompts.train.of_uid
        self.rounds.load_state_dict(state, schedule.rule, prompt_of_uid)
        self.num_rounds = state["num_rounds"]
        self.counters = Counter(state["counters"])
        if not schedule.ahead:
            self.counters["num_discarded_tokens"] += self.rounds.drop_next()
        pool, following = self.pool, self.rounds.next
        ahead = [c for group in following.groups for c in group.completions] if following else []
        for completion in (*pool.completions, *ahead):
            if completion.finished:  # a checkpoint holds no texts
                completion.text = startup.decode(completion.own_ids)
        if self.learner.needs_group or schedule.selection:
            check_whole_groups(pool, self.settings.num_generations)
        self.current, self._start, self._empty_steps = None, 0, 0
        if (saved := state["round"]) is not None:
            self.current = Round.from_state(saved, prompt_of_uid)
            self._start, self._empty_steps = saved["start"], saved["empty_steps"]
            self.update.accumulate_again(self.current, self._cursor())
