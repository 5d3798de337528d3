"""The position of a run in its rounds, and what lasts from one round to the next."""

from collections import Counter
from typing import Any

from lightning import Trainer

from lit_rlsched.data.rows import RowTable
from lit_rlsched.ranks import Team
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.run.advice import Advice
from lit_rlsched.run.record import RunRecord
from lit_rlsched.run.startup import Startup
from lit_rlsched.run.trainer import Clock, FitSettings
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.timeline import Timeline
from lit_rlsched.training.draft_verifier import Drafts
from lit_rlsched.training.learner import Learner, PlainLearner
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, RunSettings, Schedule
from lit_rlsched.training.update import Update


class RunPosition:
    """Everything that a checkpoint holds of a run besides weights and optimizer, and its parts.

    The position in a round follows from the Trainer's global step, so a checkpoint has every step
    that was taken.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        """What the user has set; with several ranks the engine is in a process of its own."""
        self.schedule = Schedule(FullRound(settings.prompts_per_round))
        """Everything that callbacks have set for this run."""
        self.facts = RunFacts(settings)
        """What callbacks may know of the run when they set the schedule."""
        self.pool = Pool(settings.sampling, settings.num_generations)
        """Groups drawn from the data and not yet trained on; do not read it beside an update."""
        self.statistics = PromptStatistics()
        """What is known of each prompt."""
        self.drafts = Drafts()
        """Weights of earlier policies, to verify what they have drawn."""
        self.ahead: Rollout | None = None
        """The rollout of the next round, while it runs beside the update."""
        self.next: RoundResult | None = None
        """What that has drawn, until the round begins."""
        self.rows: dict[str, RowTable] = {}
        """Data sets read so far, by stage."""
        self.session: RolloutSession | None = None
        """Engine and rewards while they run, on rank 0."""
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
            self.pool.runs,
            self.trainer.precision_plugin.forward_context,
            self.team,
            self.statistics,
        )

    @property
    def _steps_taken(self) -> int:
        """Number of optimizer steps the Trainer takes per round; its limits may cut some."""
        limits = self.fit_settings
        return self.settings.steps_per_epoch if limits is None else limits.steps

    @property
    def round_is_over(self) -> bool:
        """Whether the Trainer has taken all its steps of the current round."""
        return self.current is not None and self.cursor() >= self._steps_taken

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

    def cursor(self, trainer: Trainer | None = None) -> int:
        """Number of steps taken of the current round."""
        assert self.current is not None
        taken = (trainer or self.trainer).global_step - self.current.version
        return taken + self.current.empty_steps

    @property
    def timeline(self) -> Timeline | None:
        """When trainer and engines work, on rank 0 while the session runs."""
        return None if self.session is None else self.session.timeline

    def drop_next(self) -> None:
        """Forget what was drawn ahead."""
        if self.next is not None:
            self.counters["num_discarded_tokens"] += self.next.tokens
        self.ahead = self.next = None

    def end_round(self) -> dict[str, float]:
        """End the current round; return the totals of what `limit_train_batches` has dropped."""
        left = self.untrained(self.cursor(), "limit_train_batches")
        self.counters += left
        self.num_rounds += 1
        self.current = None
        return {name: self.counters[name] for name in left}

    def untrained(self, taken: int, why: str) -> Counter[str]:
        """Count the completions of the current round in steps after the first `taken`."""
        assert self.current is not None
        steps = range(taken, self.settings.steps_per_round)
        dropped = sum(len(self.update.step(self.current, i).samples) for i in steps)
        return Counter({f"dropped/{why}": dropped} if dropped else {})
