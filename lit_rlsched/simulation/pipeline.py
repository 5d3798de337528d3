"""Seconds of a schedule: rounds, updates and what of them overlaps, on a virtual clock."""

import gc
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lit_rlsched.scheduling.admission import Order
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.costs import Costs
from lit_rlsched.simulation.decoder import Engines
from lit_rlsched.simulation.loop import Visit
from lit_rlsched.simulation.rounds import Drawn, SimulatedRounds
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.training.schedule import Schedule
from lit_rlsched.types import ENVIRONMENT, Sample, Sampling, stable_hash


@dataclass(frozen=True, slots=True)
class Machine:
    """What the schedule runs on."""

    slots: int = 256
    """Slots of all engines, where the schedule sets none."""
    engines: int = 1
    slowdown: float | None = None
    """How much longer engine and trainer take while both work. 1: each has its own device or core.
    2: they share one, and nothing is gained. `None`: as the costs say, or 1."""
    rank_correlation: float = 0.5
    """How well lengths are predicted: 1 is perfect, 0 is chance."""
    accepted: float = 0.95
    """Share of drafts that the next policy accepts whole."""


def slowdown_of(machine: Machine, costs: Costs) -> float:
    """Return how much longer engine and trainer take while both work."""
    return machine.slowdown or costs.slowdown or 1.0


@dataclass(slots=True)
class SimulatedRound:
    """Figures of a round."""

    seconds: float
    """From the end of the update before to the end of its own."""
    rollout: float
    """Seconds of the rollout, with the wait for the last score."""
    update: float
    around: float
    """Seconds of sync, verification and whatever else, without what goes in flight."""
    verification: float
    """Those of the passes that only verify, which may be beside decode steps."""
    decoding: float
    """Seconds of decode steps."""
    decode_steps: int
    """Without those beside the update."""
    steps_beside: int
    """Decode steps of drafts beside the update."""
    slot_steps: int
    idle_slot_steps: int
    prompts: float
    """Prompts trained on; one whose completions are in several rounds counts in parts."""
    completions: int
    trained_tokens: int
    drawn_tokens: int
    """Tokens drawn, with those that were discarded."""
    discarded_tokens: int
    stale_tokens: int
    """Tokens that were trained on, and drawn by an earlier policy."""
    peak_kv: int


@dataclass(slots=True)
class Outcome:
    """Rounds of a schedule."""

    rounds: list[SimulatedRound]
    prompts_per_update: int
    length_bias: float
    """Mean length trained on over the mean length of all prompts drawn, the warm-up included."""

    def total(self, name: str) -> float:
        """Return the sum of a figure over the rounds."""
        return float(sum(getattr(each, name) for each in self.rounds))

    @property
    def seconds(self) -> float:
        """Seconds for each update's worth of prompts."""
        return self.total("seconds") * self.prompts_per_update / max(1.0, self.total("prompts"))

    @property
    def decode_steps(self) -> float:
        """Decode steps for each update's worth of prompts."""
        steps = self.total("decode_steps") + self.total("steps_beside")
        return steps * self.prompts_per_update / max(1.0, self.total("prompts"))

    @property
    def idle_share(self) -> float:
        """Idle slot-steps over all slot-steps."""
        return self.total("idle_slot_steps") / max(1.0, self.total("slot_steps"))

    @property
    def discarded_share(self) -> float:
        """Discarded tokens over all tokens drawn."""
        return self.total("discarded_tokens") / max(1.0, self.total("drawn_tokens"))

    @property
    def stale_share(self) -> float:
        """Tokens of earlier policies among those trained on."""
        return self.total("stale_tokens") / max(1.0, self.total("trained_tokens"))

    @property
    def peak_kv(self) -> int:
        """Most tokens in the key-value cache of an engine."""
        return max(each.peak_kv for each in self.rounds)


def unsupported(schedule: Schedule) -> str | None:
    """Say what of a schedule depends on more than lengths, or `None`."""
    if schedule.drafting is not None:
        return "draft tokens of `Speculation` depend on the text"
    if schedule.max_num_gen_batches > 1:
        return "which prompts `DynamicSampling` replaces depends on rewards"
    if schedule.selection is not None and schedule.selection.reward_range:
        return "when `DownSampling(early_stop=True)` stops depends on rewards"
    if schedule.slots.memory_budget is not None:
        return "`MicroGroupSampling(memory_budget=...)` is not simulated; give `slots`"
    if schedule.slots.order == "planned":
        return "`order='planned'` is not simulated"
    if schedule.rule.has_domains:
        return "domains of prompts are not known"
    return None


@dataclass
class Pipeline:
    """Simulates a schedule."""

    schedule: Schedule
    work: Workload
    costs: Costs
    machine: Machine
    num_generations: int
    steps_per_round: int = 1
    num_iterations: int = 1
    source: Any = None
    _rounds: SimulatedRounds = field(init=False)
    _visited: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if why := unsupported(self.schedule):
            raise UsageError(f"This schedule is not simulated: {why}.")
        slots = self.schedule.slots.slots or self.machine.slots
        if slots % self.machine.engines:
            raise UsageError(
                f"{slots} slots cannot be divided among {self.machine.engines} engines. Use a "
                "multiple."
            )
        order = self._order()
        each = slots // self.machine.engines
        refill = self.schedule.slots.refill
        self._rounds = SimulatedRounds(
            self._visits() if self.source is None else self.source,
            self.work.length,
            Engines(self.machine.engines, each, self.costs.step, order, refill),
            Sampling(self.work.limit),
            self.num_generations,
            self._expected if self.schedule.lengths is not None else None,
            order == "longest_first",
            self.machine.accepted,
        )

    @property
    def engines(self) -> Engines:
        """The engines, whose `log` tells when which completion had a slot."""
        return self._rounds.engines

    def _order(self) -> Order:
        early = self.schedule.rule.ends_early
        return self.schedule.slots.resolved_order(self.schedule.lengths is not None, early)

    def _expected(self, sample: Sample) -> float:
        """Predict tokens to come: a weighted mean, in logarithms, of the truth and of chance."""
        drawn, truth = len(sample.completion.token_ids), self.work.length(sample)
        weight = self.machine.rank_correlation
        other = self.work.lengths[stable_hash(sample.id, "guess") % len(self.work.lengths)]
        guess = other[stable_hash(sample.id) % len(other)]
        return max(1.0, truth**weight * guess ** (1 - weight) - drawn)

    def run(self, rounds: int, warm_up: int = 0) -> Outcome:
        """Simulate rounds, of which the first `warm_up` do not count."""
        schedule, simulate = self.schedule, self._in_turn
        if schedule.ahead:
            simulate = self._ahead
        collects = gc.isenabled()
        gc.disable()  # it would look through all completions again and again
        try:
            simulated = simulate(rounds + warm_up)
        finally:
            if collects:
                gc.enable()
        tokens = sum(each.trained_tokens for each in simulated)
        trained = tokens / max(1, sum(each.completions for each in simulated))
        prompts = self._visited or len(self.work.lengths)
        bias = trained / self.work.mean_length(prompts, self.num_generations)
        return Outcome(simulated[warm_up:], self.schedule.rule.update_prompts, bias)

    def _visits(self) -> Iterator[Visit]:
        """Count the prompts that are drawn."""
        for visit in self.work.visits():
            self._visited += 1
            yield visit

    def _drawn(self, number: int) -> Drawn:
        drawn = self._rounds.draw(self.schedule.rule, number)
        assert drawn is not None, "the prompts never end"
        return drawn

    def _in_turn(self, rounds: int) -> list[SimulatedRound]:
        return [self.next_round(number) for number in range(rounds)]

    def next_round(self, number: int) -> SimulatedRound:
        """Simulate a rollout, then its update; gradients perhaps while others decode."""
        drawn = self._drawn(number)
        rollout, update = self._rollout(drawn), self._update(drawn)
        beside = self._streamed(drawn, rollout, update)
        seconds = rollout + update - beside + (slowdown_of(self.machine, self.costs) - 1) * beside
        return self._figures(drawn, number, seconds, rollout, update)

    def _ahead(self, rounds: int) -> list[SimulatedRound]:
        """The next round is drawn beside the update, under the weights before it."""
        made = []
        drawn = self._drawn(0)
        for number in range(rounds):
            following = self._drawn(number + 1)
            rollout, update = self._rollout(following), self._update(drawn)
            seconds = self._overlapped(rollout, update)
            if not number:
                seconds += self._rollout(drawn)
            version = number + (number > 0)  # the policy has made another step
            made.append(self._figures(drawn, version, seconds, rollout, update))
            drawn = following
        return made

    def _overlapped(self, rollout: float, update: float) -> float:
        """Seconds of a rollout and an update that begin at the same time."""
        shorter, longer = sorted((rollout, update))
        return longer + (slowdown_of(self.machine, self.costs) - 1) * shorter

    def _verification(self, drawn: Drawn) -> float:
        """Seconds of the passes that verify drafts; one that is cut is read twice."""
        return self.costs.verify * (drawn.verified + drawn.cut)

    def _rollout(self, drawn: Drawn) -> float:
        """Seconds until the last score that the round waits for."""
        rewards, ends = self.costs.reward, drawn.ended
        if rewards[-1] <= 0:
            return drawn.seconds
        workers = [0.0] * (self.costs.reward_workers or len(ends))
        last = drawn.seconds
        for name, end in sorted(ends.items(), key=lambda of: of[1]):
            took = rewards[stable_hash(name, "reward") % len(rewards)]
            scored = max(end, workers[0]) + took
            heapq.heapreplace(workers, scored)
            last = max(last, scored)
        return last

    def _selected(self, drawn: Drawn) -> float:
        """Share of the completions that the update has."""
        selection = self.schedule.selection
        return 1.0 if selection is None else min(1.0, selection.keep / self.num_generations)

    def _update(self, drawn: Drawn) -> float:
        positions = self._selected(drawn) * sum(len(sample) for sample in drawn.trained)
        each = self.costs.position * self.costs.trained_share * positions
        return self.num_iterations * (self.steps_per_round * self.costs.update + each)

    def _streamed(self, drawn: Drawn, rollout: float, update: float) -> float:
        """Seconds of gradients that are computed while others decode."""
        streaming = self.schedule.streaming
        if streaming is None:
            return 0.0
        groups = drawn.harvest.trained
        total = sum(len(sample) for sample in drawn.trained)
        ready = sorted(
            (
                max((drawn.ended.get(Sample(g, c).id, 0.0) for c in g.completions), default=0.0),
                sum(len(Sample(g, c)) for c in g.completions) / max(1, total),
            )
            for g in groups
        )
        first = max(1, int(streaming.start * self.schedule.rule.update_prompts))
        at, beside = ready[min(first, len(ready)) - 1][0], 0.0
        for moment, share in ready:
            if (at := max(at, moment)) >= rollout:
                break
            took = share * (update - self.costs.update)
            beside += max(0.0, min(took, rollout - at))
            at += took
        return beside

    def _figures(
        self, drawn: Drawn, version: int, seconds: float, rollout: float, update: float
    ) -> SimulatedRound:
        trained, harvest = drawn.trained, drawn.harvest
        tokens = stale = 0
        for sample in trained:
            for author, n in sample.completion.segments:
                if author != ENVIRONMENT:
                    tokens += n
                    stale += n * (author < version)
        verification = self._verification(drawn)
        around = self.costs.sync + self.costs.other + verification
        return SimulatedRound(
            seconds + around,
            rollout,
            update,
            around,
            verification,
            drawn.seconds,
            drawn.turns,
            0,
            drawn.slot_steps,
            drawn.slot_steps - drawn.row_steps,
            len(trained) / self.num_generations,
            len(trained),
            tokens,
            drawn.drawn_tokens,
            harvest.discarded_tokens,
            stale,
            drawn.peak_kv,
        )
