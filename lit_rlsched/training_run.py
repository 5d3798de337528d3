"""The rounds of a run, one after the other, and where it is in them."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched import __version__
from lit_rlsched.advice import Advice
from lit_rlsched.checkpoints import FORMAT, check_format
from lit_rlsched.checks import check_resumed, check_resumed_groups, check_resumed_pool
from lit_rlsched.fit_settings import FitSettings
from lit_rlsched.hooks import fire
from lit_rlsched.logs import log_now
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.round_runner import RoundRunner
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.micro_batches import OptimizerStep
from lit_rlsched.training.round import Round
from lit_rlsched.training.rounds import RoundSettings, TrainingRounds
from lit_rlsched.training.update import Update
from lit_rlsched.types import Group

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule

_SAME_ON_RESUME = (
    "seed",
    "prompts_per_round",
    "num_generations",
    "steps_per_round",
    "num_iterations",
)
"""Settings of the data module that decide what was drawn."""


class TrainingRun:
    """Draws a round when the last one is trained on, and deals it out step by step.

    What a checkpoint holds of a run, beside weights and optimizer, is here. The place in a round
    follows from the Trainer's global step, so that whatever was taken, a checkpoint has.

    Args:
        data: Settings, engine and rewards of the run.
    """

    def __init__(self, data: "RolloutDataModule") -> None:
        self._data = data
        planner = RoundPlanner(RolloutBuffer(), data.sampling, data.num_generations)
        self.rounds = TrainingRounds(RoundRunner(planner))
        """Draws them, and has the pool."""
        self.settings: FitSettings | None = None
        """What the Trainer is set to while it fits."""
        self.current: Round | None = None
        """The round that is being trained on."""
        self.num_rounds = 0
        """Rounds that are over."""
        self.counters: Counter[str] = Counter()
        """Totals since the run began: `num_tokens`, `num_completions`, `dropped/*`."""
        self.advice = Advice()
        """What the run was told."""
        self.resumed: dict[str, Any] | None = None
        """State of a checkpoint, until the prompts that it names are known."""
        self._start = 0
        self._empty_steps = 0
        self._last: Trainer | None = None
        """Whose policy versions the round and the pool have."""

    @property
    def _trainer(self) -> Trainer:
        assert self._data.trainer is not None
        return self._data.trainer

    @property
    def learner(self) -> Learner:
        """The module, or what stands in for one that knows nothing of rollouts."""
        module = self._trainer.lightning_module
        return module if isinstance(module, Learner) else PlainLearner()

    @property
    def update(self) -> Update:
        """How a round becomes optimizer steps, as callbacks have set it by now."""
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
        )

    @property
    def _steps_taken(self) -> int:
        """Optimizer steps that are taken of a round: `limit_train_batches` may cut them."""
        return self._data.steps_per_epoch if self.settings is None else self.settings.steps

    @property
    def round_is_over(self) -> bool:
        """Whether there is a round of which all steps were taken that the Trainer takes."""
        return self.current is not None and self._cursor() >= self._steps_taken

    def _cursor(self, trainer: Trainer | None = None) -> int:
        """Steps of the current round that were taken."""
        return (trainer or self._trainer).global_step - self._start + self._empty_steps

    def optimizer_steps(self) -> Iterator[OptimizerStep]:
        """The steps of the next round, or what is left of the one a checkpoint was made in."""
        self._data.started()  # tokenises the prompts that a checkpoint names
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
            step = self.update.step(round, index)
            if not len(step) and self._trainer.lightning_module.automatic_optimization:
                self._empty_steps += 1  # Lightning will not see it, so will not count it
            yield step

    def _roll_out(self) -> Round:
        """Draw a round, and tell what it took."""
        data, trainer = self._data, self._trainer
        session = data.started()
        round, counts = self.rounds.draw(
            session,
            data.startup.policy,
            data.schedule.rule,
            self.num_rounds,
            trainer.global_step,
            self._prepare,
        )
        self.current, self._start, self._empty_steps = round, round.version, 0
        self.counters += counts
        round.metrics |= dict.fromkeys(data.rewards.counters(), 0) | self.counters
        limit = data.sampling.max_completion_length
        told = self.advice.of_round(round, data.rewards.weights, limit, self.learner.needs_group)
        for text in told:
            rank_zero_warn(text)
        fire(trainer, "on_round_end", round)
        log_now(trainer, round.metrics)
        return round

    def _prepare(self, groups: list[Group]) -> RoundSettings:
        """Let callbacks see a round that is planned; its settings, as they have left them."""
        fire(self._trainer, "on_round_start", groups)
        schedule = self._data.schedule
        return RoundSettings(self.update, schedule.streaming, schedule.max_num_gen_batches)

    def end_round(self) -> dict[str, float]:
        """Be done with the current round; totals of what `limit_train_batches` has left of it."""
        left = self._untrained(self._cursor(), "limit_train_batches")
        self.counters += left
        self.num_rounds += 1
        self.current = None
        return {name: self.counters[name] for name in left}

    def _untrained(self, taken: int, why: str) -> Counter[str]:
        """Completions of the current round in steps after the first `taken`, dropped."""
        assert self.current is not None
        steps = range(taken, self._data.steps_per_round)
        dropped = sum(len(self.update.step(self.current, i).samples) for i in steps)
        return Counter({f"dropped/{why}": dropped} if dropped else {})

    def _leave(self, trainer: Trainer) -> None:
        """Begin anew with the prompts of another Trainer's pool: its policy versions mean nothing.

        What was left of its last round is dropped.
        """
        if self.current is not None:
            self.counters += self._untrained(self._cursor(trainer), "new_trainer")
            self.num_rounds += 1
        self.current, self._start, self._empty_steps = None, 0, 0
        self.advice = Advice()
        self.counters["num_discarded_tokens"] += self.rounds.leave_run()

    @property
    def rounds_over(self) -> int:
        """Rounds that are trained on as a whole."""
        if self.resumed is not None:
            return int(self.resumed["num_rounds"])
        return self.num_rounds + self.round_is_over

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors only."""
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
            "settings": {name: getattr(self._data, name) for name in _SAME_ON_RESUME},
            "reward_funcs": list(self._data.rewards.names),
            **self.rounds.state_dict(),
            "num_rounds": self.num_rounds + over,
            "counters": dict(counters),
            "advice": self.advice.state_dict(),
            "round": saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the prompts that it names are known.

        Raises:
            ValueError: a setting differs that decides what was drawn, or the state has a format
                that is not known.
        """
        check_format(state)
        data = self._data
        check_resumed(state["settings"], vars(data))
        drawn = [state["pool"], *([state["round"]["groups"]] if state["round"] else [])]
        limit = data.sampling.max_completion_length
        check_resumed_groups(drawn, state.get("reward_funcs"), data.rewards.names, limit)
        self.resumed = state

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on with the state of a checkpoint."""
        data, startup = self._data, self._data.startup
        prompts = {prompt.uid: prompt for prompt in startup.prompts.train}
        self.rounds.load_state_dict(state, prompts.__getitem__)
        pool = self.rounds.runner.planner.pool
        for completion in pool.completions:
            if not data.schedule.rule.keeps_drafts:
                completion.draft = None  # from a run with `reuse_drafts`, resumed without
            if completion.finished:
                completion.text = startup.decode(completion.token_ids)
        if self.learner.needs_group or data.schedule.selection:
            check_resumed_pool(pool, data.num_generations)
        self.num_rounds = state["num_rounds"]
        self.counters = Counter(state["counters"])
        self.advice.load_state_dict(state.get("advice", {}))
        self.current, self._start, self._empty_steps = None, 0, 0
        if (saved := state["round"]) is not None:
            self.current = Round.from_state(saved, prompts.__getitem__)
            self._start, self._empty_steps = saved["start"], saved["empty_steps"]
