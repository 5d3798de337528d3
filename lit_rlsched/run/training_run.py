"""The rounds of a run, one after the other, and the position in them."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched import __version__
from lit_rlsched.data.rows import name_of
from lit_rlsched.data.stream import StreamSource
from lit_rlsched.ranks import Team
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.round_runner import RoundRunner
from lit_rlsched.run.advice import Advice
from lit_rlsched.run.checks import check_group_size, check_logprobs, check_same_ranks, check_trainer
from lit_rlsched.run.interrupts import asked_to_stop, stop_together
from lit_rlsched.run.saving.resuming import (
    FORMAT,
    SAME_ON_RESUME,
    check_drawn,
    check_format,
    check_has_state,
    check_same_settings,
    check_whole_groups,
    complete,
)
from lit_rlsched.run.startup import in_own_process
from lit_rlsched.run.trainer import Clock, FitSettings, fire, fire_in_module, log_now
from lit_rlsched.run.wandb_runs import describe_runs
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.rounds import Drawing, RoundSettings, TrainingRounds
from lit_rlsched.training.update import Update

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule

T = TypeVar("T")


class TrainingRun:
    """Gives out optimizer steps, from a round that is drawn once the last one is trained on.

    Everything a checkpoint holds of a run besides weights and optimizer is here. The position in a
    round follows from the Trainer's global step, so a checkpoint has every step that was taken.

    Args:
        data: The data module, for settings, engine and rewards.
    """

    def __init__(self, data: "RolloutDataModule") -> None:
        self._data = data
        planner = RoundPlanner(RolloutBuffer(), data.sampling, data.num_generations)
        self.rounds = TrainingRounds(RoundRunner(planner))
        """Draws the rounds and holds the pool."""
        self.settings: FitSettings | None = None
        """Settings of the Trainer during `fit`."""
        self.current: Round | None = None
        """The round that is being trained on."""
        self.num_rounds = 0
        """Number of rounds ended."""
        self.counters: Counter[str] = Counter()
        """Totals since the run began: `num_tokens`, `num_completions`, `dropped/*`."""
        self.clock = Clock()
        """Time in `fit`."""
        self.advice = Advice()
        """Warnings given so far."""
        self.resumed: dict[str, Any] | None = None
        """State of a checkpoint, until the prompts that it names are tokenised."""
        self.team = Team()
        """The Trainer's processes."""
        self._parts: list[OptimizerStep] = []
        """Parts of the round's first step that this rank has accumulated for the leader."""
        self._start = 0
        self._empty_steps = 0
        self._last: Trainer | None = None
        """Trainer whose policy versions the round and the pool have."""

    @property
    def _trainer(self) -> Trainer:
        assert self._data.trainer is not None
        return self._data.trainer

    @property
    def learner(self) -> Learner:
        """The module, or a `PlainLearner` for a module that is not a `Learner`."""
        module = self._trainer.lightning_module
        return module if isinstance(module, Learner) else PlainLearner()

    @property
    def update(self) -> Update:
        """How a round becomes optimizer steps, as callbacks have set it so far."""
        data = self._data
        return Update(
            self.learner,
            data.schedule.rule,
            data.schedule.selection,
            data.rewards.weights,
            seed=data.seed,
            runs=self.rounds.runner.runs,
            steps_per_round=data.steps_per_round,
            num_iterations=data.num_iterations,
            micro_batch_tokens=data.micro_batch_tokens,
            mask_truncated=data.mask_truncated_completions,
            mask_stale=data.schedule.mask_stale_tokens,
            forward_context=self._trainer.precision_plugin.forward_context,
            team=self.team,
            stale=data.schedule.ahead == "importance",
        )

    @property
    def _steps_taken(self) -> int:
        """Number of optimizer steps the Trainer takes per round; its limits may cut some."""
        return self._data.steps_per_epoch if self.settings is None else self.settings.steps

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
        """Number of rounds of which the Trainer has taken all its steps."""
        if self.resumed is not None:
            return int(self.resumed["num_rounds"])
        return self.num_rounds + self.round_is_over

    def _cursor(self, trainer: Trainer | None = None) -> int:
        """Number of steps taken of the current round."""
        return (trainer or self._trainer).global_step - self._start + self._empty_steps

    def join(self) -> None:
        """Form a team with the Trainer's other processes.

        Raises:
            MisconfigurationException: the Trainer's strategy or one of its callbacks is not
                supported, or processes differ in version, seed or sizes.
            ValueError: the Trainer's precision is not supported.
        """
        trainer = self._trainer
        check_trainer(trainer)
        if trainer.world_size > 1:
            self._data.engine = in_own_process(self._data.engine)
        if trainer.world_size > 1 and dist.is_initialized():  # in an estimate it is not
            from lit_rlsched.ranks import DistributedTeam

            self.team = DistributedTeam()
            check_same_ranks(self.team.all_gather({"version": __version__, **self._settings}))
            stop_together(trainer)

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self._data, name) for name in SAME_ON_RESUME}

    def begin(self) -> None:
        """Read the Trainer's settings, start the clock, describe the run to W&B, and check it.

        Raises:
            ValueError: data module and module contradict each other.
        """
        data = self._data
        self.settings = FitSettings(self._trainer, data.steps_per_epoch)
        self.clock.start()
        describe_runs(self._trainer, data.engine)
        check_group_size(data.num_generations, self.learner.needs_group)
        if self.learner.needs_engine_logprobs(off_policy=False):
            check_logprobs("`old_logprobs='engine'`", data.engine, data.sampling)

    def finish(self) -> None:
        """Stop the clock, and give the Trainer its settings back."""
        if self.settings is not None:
            self.settings.undo()
        self.clock.stop()
        self.rounds.next.abandon()
        self.team.close()
        self.team = Team()

    def lead(self, draw: Callable[[], T]) -> T:
        """Run `draw` where the engine is, while the other ranks do their part; see `Team.lead`."""
        tasks: dict[str, Any] = {}
        if not self.team.leads:
            module = self._trainer.lightning_module
            tasks = {
                **self._data.startup.policy_reader.tasks,
                "round_start": partial(fire_in_module, self._trainer, "on_round_start"),
                "score": self.update.score,
                "accumulate": self._accumulate,
                "sharing": getattr(module, "decide_sharing", None),
            }
        return self.team.lead(draw, tasks)

    def _accumulate(self, part: Round, divisor: tuple[int, int], first: bool) -> None:
        self._parts.append(self.update.accumulate_part(part, divisor, first))

    def optimizer_steps(self) -> Iterator[OptimizerStep]:
        """Yield the steps of the next round, or the remaining ones of a resumed round."""
        self._data.start()  # tokenises the prompts that a checkpoint names
        if self.resumed is not None:
            self._restore(self.resumed)
            self.resumed = None
        elif self._last is not None and self._last is not self._trainer:
            self._leave(self._last)
        self._last = self._trainer
        if self.round_is_over:
            self.end_round()
        round = self.current or self._roll_out()
        for index in range(self._cursor(), self._steps_taken):
            self._stop_together()
            step = self.update.step(round, index)
            if not len(step) and self._trainer.lightning_module.automatic_optimization:
                self._empty_steps += 1  # Lightning gets no micro-batch and counts no step
            yield step

    def _stop_together(self) -> None:
        """Stop all ranks if a signal has asked one of them to."""
        if self.team.size > 1 and any(self.team.all_gather(asked_to_stop(self._trainer))):
            raise SIGTERMException

    def _roll_out(self) -> Round:
        """Draw a round, log its metrics and call the hooks."""
        trainer, self._parts = self._trainer, []
        round, self.counters = self.lead(self._draw)
        if not self.team.leads:
            self.current, self._start, self._empty_steps = round, round.version, 0
            round.accumulated = self._parts
            fire_in_module(trainer, "on_round_end", round)
        if self._data.schedule.ahead:
            self.lead(lambda: self.rounds.draw_ahead(self.drawing(self.num_rounds + 1)))
        log_now(trainer, self.position | round.metrics)
        return round

    def _draw(self) -> tuple[Round, Counter[str]]:
        """Draw a round, on the rank that has the engine."""
        data, trainer = self._data, self._trainer
        round, counts = self.rounds.draw(self.drawing(self.num_rounds))
        self.current, self._start, self._empty_steps = round, round.version, 0
        self.counters += counts
        round.metrics |= dict.fromkeys(data.rewards.counters(), 0) | self.counters
        weights, limit = data.rewards.weights, data.sampling.max_completion_length
        for text in self.advice.of_round(round, weights, limit, self.learner.needs_group):
            rank_zero_warn(text)
        fire(trainer, "on_round_end", round)
        return round, self.counters

    def wait_for_rollout(self) -> None:
        """Wait for the rollout beside the update, on all ranks."""
        if self._data.schedule.ahead:
            self.lead(self.rounds.next.wait)

    def drawing(self, number: int) -> Drawing:
        """Return what a round is drawn with under the current weights."""
        data, trainer = self._data, self._trainer
        assert data.session is not None
        return Drawing(
            data.session,
            data.startup.policy,
            data.schedule.rule,
            number,
            trainer.global_step,
            partial(self.team.call, "round_start", partial(fire, trainer, "on_round_start")),
            lambda: self._round_settings,
        )

    @property
    def _round_settings(self) -> RoundSettings:
        schedule = self._data.schedule  # callbacks may change it in their hooks
        goes_on = self.settings is not None and not self.settings.is_last_round
        ahead, fills = schedule.ahead if goes_on else None, goes_on and schedule.fills_drain
        batches, verify_sync = schedule.max_num_gen_batches, self._data.verify_sync
        return RoundSettings(self.update, schedule.streaming, batches, ahead, fills, verify_sync)

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
        steps = range(taken, self._data.steps_per_round)
        dropped = sum(len(self.update.step(self.current, i).samples) for i in steps)
        return Counter({f"dropped/{why}": dropped} if dropped else {})

    def _leave(self, trainer: Trainer) -> None:
        """Keep the prompts of another Trainer's pool, and drop what it drew and did not train on.

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
        if self.resumed is not None:  # nothing has happened since it was loaded
            return self.resumed
        over, counters, saved = self.round_is_over, self.counters, None
        if over:
            counters = counters + self._untrained(self._cursor(), "limit_train_batches")
        elif self.current is not None:
            at = {"start": self._start, "empty_steps": self._empty_steps}
            saved = self.current.state_dict() | at
        return {
            "format": FORMAT,
            "version": __version__,
            "settings": self._settings,
            "reward_funcs": list(self._data.rewards.names),
            "train_data": name_of(self._data.train_data),
            **self.rounds.state_dict(),
            "prompts": self._streamed_prompts(None if over else self.current),
            "num_rounds": self.num_rounds + over,
            "counters": dict(counters),
            "seconds": self.clock.seconds,
            "advice": self.advice.state_dict(),
            "round": saved,
        }

    def _streamed_prompts(self, round: Round | None) -> Any:
        """Prompts of a stream that pool and round need; a stream gives each of them once."""
        planner = self.rounds.runner.planner
        if not isinstance(planner.source, StreamSource):
            return None
        groups = [*planner.pool, *self.rounds.next.groups, *(round.groups if round else ())]
        return planner.source.pack(groups)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the state of a checkpoint, and keep it until its prompts are tokenised.

        Raises:
            ValueError: a setting that decides what is drawn has another value, or the format of the
                state is unknown.
        """
        check_format(state)
        data = self._data
        check_same_settings(state["settings"], vars(data))
        drawn = [state["pool"], *([state["round"]["groups"]] if state["round"] else [])]
        if ahead := state.get("next", {}).get("round"):
            drawn.append(ahead["trained"])
        limit = data.sampling.max_completion_length
        check_drawn(drawn, state.get("reward_funcs"), data.rewards.names, limit)
        self.clock.before = state.get("seconds", 0.0)
        self.resumed = state

    def check_resumed(self) -> None:
        """Refuse a checkpoint without a run; know the warnings that a run has given before."""
        trainer = self._trainer
        if self.resumed is not None:
            self.advice.load_state_dict(self.resumed.get("advice", {}))
        elif trainer.state.fn == "fit":
            check_has_state(trainer.ckpt_path, type(self._data).__qualname__)

    def _restore(self, state: dict[str, Any]) -> None:
        data, startup = self._data, self._data.startup
        source = self.rounds.runner.planner.source
        if isinstance(source, StreamSource):
            prompt_of_uid = source.unpack(state.get("prompts") or ()).__getitem__
        else:
            prompt_of_uid = startup.prompts.train.of_uid
        self.rounds.load_state_dict(state, data.schedule.rule, prompt_of_uid)
        self.num_rounds = state["num_rounds"]
        self.counters = Counter(state["counters"])
        pool, following = self.rounds.runner.planner.pool, self.rounds.next
        if (following.tokens and data.schedule.ahead != "importance") or not data.schedule.ahead:
            self.counters["num_discarded_tokens"] += following.tokens
            following.clear()
        ahead = [c for group in following.groups for c in group.completions]
        keeps = data.schedule.verifies_drafts
        complete([*pool.completions, *ahead], startup.decode, keeps)
        if self.learner.needs_group or data.schedule.selection:
            check_whole_groups(pool, data.num_generations)
        self.advice.load_state_dict(state.get("advice", {}))
        self.current, self._start, self._empty_steps = None, 0, 0
        if (saved := state["round"]) is not None:
            self.current = Round.from_state(saved, prompt_of_uid)
            self._start, self._empty_steps = saved["start"], saved["empty_steps"]
            self.update.accumulate_again(self.current, self._cursor())
