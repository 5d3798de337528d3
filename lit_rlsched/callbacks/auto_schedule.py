"""Chooses the rule of rounds by itself, from simulations of the run's own recent rounds."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks.candidates import (
    Candidate,
    breaks,
    candidate,
    rule_options,
    wanted_of,
    written,
)
from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.run.saving.traces import about_run, tables_of, warn_of_another_run
from lit_rlsched.scheduling.switched_rounds import SwitchedRound
from lit_rlsched.scheduling.trace_files import Tables, Traces, numbered
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.costs import Costs, calibrated
from lit_rlsched.simulation.pipeline import Machine, Outcome, Pipeline, unsupported
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.text import percent
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, Schedule

if TYPE_CHECKING:
    import pyarrow as pa

ROUNDS, WARM_UP = 8, 4
"""Rounds that a decision simulates, and those before them."""
RECENT = 8
"""Newest rounds whose lengths and costs a simulation uses."""
FIRST = 2
"""Rounds before the first decision: one warms up."""
NEXT = "auto_schedule/next"
"""Metric with the number of the rule of the next round."""


class AutoSchedule(RolloutCallback):
    """Choose when rounds end, every few rounds, by simulating the alternatives.

    Candidates are rounds that wait for all completions, `SortedBatching` in the modes `verified`
    and `partial`, and two kinds of `TailBatching` with drafts, each with and without
    `DrainFilling`, as far as the constraints and the other callbacks allow them. Each is simulated
    on the lengths, latencies and costs of the last 8 rounds (`lit-rlsched simulate`). If one is
    faster than the current one by more than `gain`, it is in charge from the next round on. What
    is in the pool stays there, with its tokens as drafts.

    Decisions depend on seconds, so a run that is repeated may decide otherwise. They are in
    checkpoints and, with `RolloutLogger`, in traces: a run that is resumed in the same
    `default_root_dir` repeats those that the run before it took after the checkpoint, and `replay`
    repeats all of another run.

    Bias: that of the candidate in charge. `on_policy` leaves out those that train on tokens of
    earlier policies, `unbiased` those whose trained completions are shorter than what they draw.

    Args:
        constraints: What candidates keep to: `on_policy`, `unbiased`.
        every_n_rounds: Rounds between two decisions; the first comes after two rounds.
        rounds_between_switches: Least number of rounds with the same candidate.
        gain: Least gain in seconds for which it switches, as a share.
        replay: Folder of a run whose decisions are repeated.

    Raises:
        UsageError: an argument is out of range, no candidate is left to choose from, several ranks
            train, lengths are predicted without an `order`, or a checkpoint or `replay` has chosen
            what is not allowed here.

    Example::

        Trainer(callbacks=[AutoSchedule(), RolloutLogger()])
    """

    sets = "when a round ends"

    def __init__(
        self,
        constraints: Sequence[str] = ("on_policy",),
        every_n_rounds: int = 5,
        rounds_between_switches: int = 10,
        gain: float = 0.05,
        replay: str | None = None,
    ) -> None:
        self.wanted = wanted_of(constraints)
        self.every_n_rounds = every_n_rounds
        self.rounds_between_switches = rounds_between_switches
        self.gain = gain
        self.replay = replay
        self.candidates: dict[int, Candidate] = {}
        """Alternatives by their number in `rule_options`; 0 waits for all completions."""
        self._rule: SwitchedRound | None = None
        self._schedule: Schedule | None = None
        self._next = 0
        self._switched = 0
        """Number of rounds when it switched last."""
        self._trainer: Trainer | None = None
        """The Trainer, while it fits."""
        self._warned = False
        self._known: dict[int, int] = {}
        """Decisions of an earlier run: the number of the next rule, by round."""
        self._recent: deque[tuple[int, dict[str, pa.Table]]] = deque(maxlen=RECENT)

    def describe(self) -> str:
        """Return the settings in words."""
        return (
            f"every {self.every_n_rounds} rounds simulations of recent rounds decide whether "
            f"another schedule would be {percent(self.gain)} faster"
        )

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set a rule that can be switched."""
        if facts.ranks > 1:
            raise UsageError(
                "`AutoSchedule` works with one process that trains. Use `devices=1`, or choose a "
                "schedule with `lit-rlsched simulate`."
            )
        alone = replace(facts, callbacks=facts.callbacks - {type(self).__name__})
        found = enumerate(candidate(chosen, alone) for chosen in rule_options())
        self.candidates = {
            number: each
            for number, each in found
            if each is not None
            and not ("on_policy" in self.wanted and each.schedule.rule.off_policy)
        }
        if len(self.candidates) < 2:
            raise UsageError(
                "`AutoSchedule` has nothing to choose from: beside the other callbacks no schedule "
                "but the plain one is possible. Leave it out."
            )
        for each in self.candidates.values():
            schedule.compares_logprobs |= each.schedule.compares_logprobs
            schedule.trains_on_stale = schedule.trains_on_stale or each.schedule.trains_on_stale
        rules = {number: each.schedule.rule for number, each in self.candidates.items()}
        schedule.rule = self._rule = SwitchedRound(rules)
        self._schedule = schedule
        self.switch()

    @property
    def chosen(self) -> int:
        """Number of the candidate that is in charge from the next round on."""
        return self._next

    def switch(self) -> None:
        """Put the chosen candidate in charge; no round may be on its way."""
        self._switch(self._next)

    def _switch(self, number: int) -> None:
        assert self._rule is not None and self._schedule is not None
        if number not in self.candidates:
            options = rule_options()
            name = " + ".join(map(written, options[number] if number < len(options) else ()))
            raise UsageError(
                f"`AutoSchedule`: the run that is resumed or replayed has chosen {name or number}, "
                "which is not among the candidates of this one. Use its `constraints` and its "
                "other callbacks."
            )
        self._rule.chosen = number
        self._schedule.fills_drain = self.candidates[number].schedule.fills_drain

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go first, so that loggers get the decision; read the decisions of the run to replay."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        assert self._schedule is not None
        if why := unsupported(self._schedule):
            raise UsageError(
                f"`AutoSchedule` cannot simulate this run: {why}. Leave one of them out."
            )
        if self._schedule.lengths is not None and self._schedule.slots.order is None:
            raise UsageError(
                "`AutoSchedule` with `LengthPrediction`: the default order of completions would "
                "depend on the rule. Set it: `MicroGroupSampling(order='longest_first')`."
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._trainer, self._known = trainer, {}
        self._recent.clear()
        if self.replay is not None:
            warn_of_another_run(run_of(trainer, self), self.replay, type(self).__name__)
            self._known = decisions_of(self.replay, required=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the chosen rule in charge, before the next round is planned."""
        if run_of(trainer, self).round_is_over:
            self.switch()

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Decide about the next round."""
        run = run_of(trainer, self)
        number = round.ordinal
        self._recent.append((number, tables_of(run, round)))
        if number in self._known:
            self._choose(self._known[number], number)
        elif self.decides(number) and len(self._recent) >= FIRST:
            try:
                outcomes = self.simulate(Recent([*self._recent], about_run(run)))
                round.metrics["auto_schedule/gain"] = self.decide(outcomes, number)
            except (ValueError, ArithmeticError) as error:  # a `UsageError` is a `ValueError`
                if not self._warned:
                    rank_zero_warn(f"`AutoSchedule` has not decided about a round: {error}")
                self._warned = True
        round.metrics[NEXT] = float(self._next)

    def decides(self, number: int) -> bool:
        """Whether there is a decision after so many rounds."""
        return number == FIRST or number % self.every_n_rounds == 0

    def _choose(self, chosen: int, number: int) -> None:
        if chosen != self._next:
            self._next, self._switched = chosen, number

    def decide(self, outcomes: Mapping[int, Outcome], number: int) -> float:
        """Choose the fastest candidate, if it is fast enough and the last switch is long ago.

        Args:
            outcomes: Simulations by the number of the candidate.
            number: Number of rounds drawn.

        Returns:
            By which share the fastest is faster than the current one.
        """
        best = min(outcomes, key=lambda each: outcomes[each].seconds)
        gain = 1 - outcomes[best].seconds / outcomes[self._next].seconds
        rested = number - self._switched >= self.rounds_between_switches or not self._switched
        if gain > self.gain and rested:
            self._choose(best, number)
        return gain

    def simulate(self, recent: "Recent") -> dict[int, Outcome]:
        """Simulate each candidate that keeps to the constraints; the current one in any case."""
        about, machine = recent.about, Machine(max(1, recent.slots), recent.about["engines"])
        shape = about["num_generations"], about["steps_per_round"], about["num_iterations"]
        work = Workload.of_run(recent).shuffled(len(recent.rounds))
        return self.outcomes(work, calibrated(recent), machine, *shape)

    def outcomes(
        self, work: Workload, costs: Costs, machine: Machine, *shape: int
    ) -> dict[int, Outcome]:
        """Simulate the candidates; the arguments are those of `Pipeline`."""
        assert self._schedule is not None
        outcomes = {}
        for number, each in self.candidates.items():
            schedule = copy(self._schedule)
            schedule.rule = each.schedule.rule
            schedule.fills_drain = each.schedule.fills_drain
            outcome = Pipeline(schedule, work, costs, machine, *shape).run(ROUNDS, WARM_UP)
            if number == self._next or not breaks(schedule, outcome, self.wanted):
                outcomes[number] = outcome
        return outcomes

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far."""
        chosen = 0 if self._rule is None else self._rule.chosen
        return {"next": self._next, "switched": self._switched, "chosen": chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them: a round that is being trained on keeps its rule.

        What the run decided after its checkpoint is in its traces, and is decided again.
        """
        self._next, self._switched = state_dict["next"], state_dict["switched"]
        if (trainer := self._trainer) is None:
            return  # a validation draws no rounds
        if self.replay is None:
            self._known = decisions_of(trainer.default_root_dir, required=False)
        saved = run_of(trainer, self).resumed
        goes_on = saved is not None and saved["round"] is not None
        self._switch(state_dict["chosen"] if goes_on else self._next)


class Recent(Tables):
    """The traces of the newest rounds, in memory.

    Args:
        rounds: Number and tables of each round.
        about: What holds for all rounds.
    """

    folder = "this run"

    def __init__(
        self, rounds: Sequence[tuple[int, Mapping[str, "pa.Table"]]], about: dict[str, Any]
    ) -> None:
        super().__init__()
        self.about = about
        self.rounds = rounds

    @property
    def slots(self) -> int:
        """Slots of the newest round."""
        return int(self.rows("rounds")[-1]["slots"])

    def parts(self, name: str) -> Iterator["pa.Table"]:
        for number, tables in self.rounds:
            if name in tables and tables[name].num_rows:
                yield numbered(tables[name], number)


def decisions_of(folder: str, required: bool) -> dict[int, int]:
    """Read the number of the rule that a run chose after each round."""
    found: dict[int, int] = {}
    try:
        for row in Traces(folder).rows("rounds"):
            metrics = dict(row["metrics"])
            if NEXT in metrics:
                found[row["round"]] = int(metrics[NEXT])
    except UsageError:
        if required:
            raise
    if required and not found:
        raise UsageError(
            f"`AutoSchedule(replay={folder!r})`: that run has no decisions. Give the folder of a "
            "run with `AutoSchedule` and `RolloutLogger`."
        )
    return found
