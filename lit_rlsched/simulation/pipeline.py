"""Seconds of a schedule: the round loop of `fit` on a virtual clock, and what of it overlaps.

    Pipeline(schedule, work, costs, machine, num_generations).run(rounds) -> Outcome

Given lengths (`Workload`), what steps cost (`Costs`), slots and engines (`Machine`) and the
schedule that callbacks make (`make_schedule`), the outcome has the seconds of each round, the
tokens that it trains on, and the share of them that an earlier policy has drawn.

What ends when is exact: rule, pool, admission and engines are those of a run. Which drafts a newer
policy keeps, and how well lengths are predicted, is not known before; shares are taken instead.
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import DraftAudit, RoundResult
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import UsageError
from lit_rlsched.simulation.costs import Costs
from lit_rlsched.simulation.loop import PromptList, simulated_session
from lit_rlsched.simulation.peers import FirstReadyRound
from lit_rlsched.simulation.workload import SimulatedTurns, Workload
from lit_rlsched.training.schedule import Schedule
from lit_rlsched.types import (
    ENVIRONMENT,
    Group,
    LengthOnly,
    Request,
    Sample,
    Sampling,
    stable_hash,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the schedule runs on."""

    slots: int = 256
    """Slots of all engines, where the schedule sets none."""
    engines: int = 1
    slowdown: float = 1.0
    """How much longer engine and trainer take while both work. 1: each has its own device or core.
    2: they share one, and nothing is gained."""
    rank_correlation: float = 0.5
    """How well lengths are predicted: 1 is perfect, 0 is chance."""
    accepted: float | Sequence[float] = 0.95
    """Share of drafts that a policy one round younger accepts whole; perhaps followed by the shares
    that policies two, three, ... rounds younger accept. Of older drafts as much per round."""

    def accepts(self, age: float) -> float:
        """Return the share of drafts of an age, in rounds, that are accepted whole."""
        shares = [self.accepted] if isinstance(self.accepted, int | float) else self.accepted
        known = max(1, min(math.ceil(age), len(shares)))
        return float(shares[known - 1] ** (age / known))


@dataclass(slots=True)
class SimulatedRound:
    """Figures of a round."""

    seconds: float
    """From the end of the update before to the end of its own."""
    rollout: float
    """Seconds of the rollout, with the wait for the last score: of the next round's, if it is drawn
    beside the update."""
    update: float
    around: float
    """Seconds of sync, verification and whatever else."""
    decoding: float
    """Seconds of decode steps."""
    decode_steps: int
    slot_steps: int
    idle_slot_steps: int
    prompts: float
    """Prompts trained on; one whose completions are in several rounds counts in parts."""
    trained_tokens: int
    drawn_tokens: int
    """Tokens drawn, with those that were discarded."""
    discarded_tokens: int
    peak_kv: int
    ages: Counter[float]
    """Tokens that were trained on, by the number of rounds since they were drawn."""


@dataclass(slots=True)
class Outcome:
    """Rounds of a schedule."""

    rounds: list[SimulatedRound]
    prompts_per_update: int
    length_bias: float
    """Mean length trained on over the mean length of all prompts drawn, the warm-up included."""
    seconds: float = field(init=False)
    """Seconds for each update's worth of prompts."""
    decode_steps: float = field(init=False)
    """Decode steps for each update's worth of prompts."""
    idle_share: float = field(init=False)
    """Idle slot-steps over all slot-steps."""
    discarded_share: float = field(init=False)
    """Discarded tokens over all tokens drawn."""
    stale_share: float = field(init=False)
    """Tokens of earlier policies among those trained on."""
    age: float = field(init=False)
    """Mean age of the tokens trained on, in rounds."""
    oldest: float = field(init=False)
    """Age of the oldest of them."""
    peak_kv: int = field(init=False)
    """Most tokens in the key-value cache of an engine."""

    def __post_init__(self) -> None:
        *names, _ = (figure.name for figure in fields(SimulatedRound))
        total = {name: float(sum(getattr(of, name) for of in self.rounds)) for name in names}
        ages = sum((of.ages for of in self.rounds), Counter[float]())
        prompts = max(1.0, total["prompts"])
        self.seconds = total["seconds"] * self.prompts_per_update / prompts
        self.decode_steps = total["decode_steps"] * self.prompts_per_update / prompts
        self.idle_share = total["idle_slot_steps"] / max(1.0, total["slot_steps"])
        self.discarded_share = total["discarded_tokens"] / max(1.0, total["drawn_tokens"])
        self.stale_share = 1 - ages[0] / max(1, ages.total())
        self.age = sum(age * tokens for age, tokens in ages.items()) / max(1, ages.total())
        self.oldest = max(ages, default=0)
        self.peak_kv = max(of.peak_kv for of in self.rounds)


def unsupported(schedule: Schedule) -> str | None:
    """Say what of a schedule depends on more than lengths, or `None`."""
    if schedule.replacement or schedule.pilot or schedule.chooser:
        return "it depends on rewards; `--success_rates` says what is saved in tokens"
    if schedule.stops_early:
        return "when `DownSampling(early_stop=True)` stops depends on rewards"
    if schedule.slots.memory_budget is not None:
        return "`MicroGroupSampling(memory_budget=...)` is not simulated; give `slots`"
    if schedule.rule.has_domains:
        return "domains of prompts are not known"
    return None


class _Engine(SimulatedEngine):
    """Decodes completions of known lengths, and spares the prefill that a prefix cache would."""

    def __init__(self, pipeline: "Pipeline") -> None:
        step = pipeline.costs.step
        super().__init__(
            lambda request: pipeline.length(request.id),
            *(step.base, step.running, step.kv, step.prefill),
            length_only=True,
            stream=False,
        )
        self.share, self.keeps_all = step.cached, pipeline.keeps_cache
        self._pipeline = pipeline
        self.begun: set[str] = set()
        """Groups and completions that have had a slot in this round."""

    def prefilled(self, request: Request) -> int:
        if self.keeps_all and request.prefix_ids:
            return 0
        whole = super().prefilled(request)
        known = len(request.prompt_ids) if request.group in self.begun else 0
        if request.id in self.begun:  # it comes back with a reply
            last = self._pipeline.samples[request.id].completion.segments[-1:]
            known = whole - sum(n for author, n in last if author == ENVIRONMENT)
        self.begun |= {request.group, request.id}
        return whole - round(self.share * known)

    def steps_to_event(self) -> int:
        steps, now, turns = super().steps_to_event(), self.now(), self._pipeline.turns
        for moment in (self._pipeline.update_ends, math.inf if turns is None else turns.due):
            if moment > now:  # the loop acts then
                steps = min(steps, 1 + bisect_left(range(1, steps), moment - now, key=self.seconds))
        return steps


@dataclass(eq=False)
class _Round(RoundHooks):
    """A simulated round. The trainer's part in it: drafts are verified by chance."""

    pipeline: "Pipeline"
    verified: int = 0
    """Positions that passes have read to verify drafts."""
    certain: dict[str, float] = field(default_factory=dict)
    """Seconds of the round after which gradients of a group may be computed."""
    state: RoundState = field(init=False)
    result: RoundResult = field(init=False)
    trained: list[Sample] = field(init=False)
    """Completions that are trained on."""

    def planned(self, state: RoundState) -> None:
        self.pipeline.samples = {sample.id: sample for sample in _samples(state.planned)}

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        """Keep a draft whole, or a prefix whose length is uniform.

        The new policy reads all drafts; those that are cut are read by each policy that drew them.
        """
        pipeline, audit = self.pipeline, DraftAudit()
        for sample in _samples(groups):
            completion = sample.completion
            if (draft := completion.draft) is None:
                continue
            completion.draft, tokens, passes = None, len(draft.token_ids), 1
            audit.tokens += tokens
            positions = len(sample.group.prompt.token_ids) + tokens
            drew = [(author, n) for author, n in draft.segments if author != ENVIRONMENT]
            drawn = sum(n for _, n in drew)
            accepted = math.prod(
                pipeline.machine.accepts((version - author) / pipeline.steps) ** (n / drawn)
                for author, n in drew
            )
            chance = (stable_hash(sample.id, version) % 2**20) / 2**20
            if chance >= accepted:  # uniform in what is left of the interval
                passes += len({*draft.versions})
                tokens = int(tokens * (chance - accepted) / (1 - accepted))
                at = 0
                for author, n in draft.segments:
                    if author == ENVIRONMENT and at <= tokens < at + n:
                        tokens = max(0, at - 1)  # a cut is not before a reply
                    at += n
            self.verified += passes * positions
            audit.accepted_tokens += tokens
            length: Any = LengthOnly(tokens)
            completion.token_ids = completion.logprobs = length
            completion.segments = draft.kept(tokens, version)
            whole = tokens >= pipeline.length(sample.id, tokens)
            if whole and not pipeline.work.next_call(sample).reply:
                completion.finish_reason = "stop"
        return audit

    def advanced(self, state: RoundState, trace: RolloutTrace) -> None:
        final, state.final = state.final, len(state.decoded)  # after a step, not the next event
        for group in self.pipeline.schedule.rule.final_groups(state):
            self.certain.setdefault(group.id, trace.seconds)
        state.final = final


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [Sample(group, completion) for group in groups for completion in group.completions]


@dataclass(frozen=True)
class _Guesses:
    """Predicts lengths: a weighted mean, in logarithms, of the truth and of chance."""

    work: Workload
    weight: float

    def expect(self, samples: Sequence[Sample]) -> list[float]:
        lengths, expected = self.work.lengths, []
        for sample in samples:
            other = lengths[stable_hash(sample.id, "guess") % len(lengths)]
            guess = other[stable_hash(sample.id) % len(other)]
            total = self.work.length(sample) ** self.weight * guess ** (1 - self.weight)
            expected.append(float(max(1.0, total - sample.completion.drawn)))
        return expected

    def waits(self, sample: Sample) -> float:
        return 0.0

    def end_round(self, *_: Any) -> dict[str, float]:
        return {}  # nothing is learned

    start_round = observe = end_round


@dataclass
class Pipeline:
    """Simulates a schedule. See the top of this file."""

    schedule: Schedule
    work: Workload
    costs: Costs
    machine: Machine
    num_generations: int
    steps_per_round: int = 1
    num_iterations: int = 1
    source: Any = None
    """Where prompts come from; by default those of `work`, again and again."""
    keeps_cache: bool = False
    """Whether what goes on in the next round keeps its cache though the weights are new."""
    samples: dict[str, Sample] = field(init=False, default_factory=dict)
    """Completions of the round, by id."""
    steps: int = field(init=False)
    """Optimizer steps of a round: its last policy version is so many above its first."""
    update_ends: float = field(init=False, default=0.0)
    """When the update beside the round ends, by the engines' clocks, if its rule waits for that."""
    turns: SimulatedTurns | None = field(init=False, default=None)
    """Lets completions wait for their tools, if they call any."""

    def __post_init__(self) -> None:
        schedule, machine = self.schedule, self.machine
        self.steps = self.steps_per_round * self.num_iterations
        if why := unsupported(schedule):
            raise UsageError(f"This schedule is not simulated: {why}.")
        slots = schedule.slots.slots or machine.slots
        if slots % machine.engines:
            raise UsageError(
                f"{slots} slots cannot be divided among {machine.engines} engines. Use a multiple."
            )
        predicts, refill = schedule.lengths is not None, schedule.slots.refill
        order = schedule.slots.resolved_order(predicts, schedule.rule.ends_early)
        each = slots // machine.engines
        lengths: Any = _Guesses(self.work, machine.rank_correlation) if predicts else None
        self._engines = [_Engine(self) for _ in range(machine.engines)]
        self._session = simulated_session(
            EnginePool(self._engines) if machine.engines > 1 else self._engines[0],
            slots,
            max(self.work.prompt_tokens) + self.work.limit,
            lambda: Admission(each, refill, order),
            lengths,
        )
        if self.work.calls_tools:
            turns: Any = SimulatedTurns(self.work, self._engines)
            self.turns = self._session.turns = turns
        self._prompts = PromptList(self.work.visits())
        source = self.source or self._prompts
        self._pool = Pool(Sampling(self.work.limit), self.num_generations, source)

    def length(self, name: str, least: int = 0) -> int:
        """Return the tokens of a completion when its turn ends, `least` or more."""
        sample = self.samples[name]
        replies = len(sample.completion.token_ids) - sample.completion.drawn
        return min(max(self.work.next_call(sample).at + replies, least), self.work.limit)

    def run(self, rounds: int, warm_up: int = 0) -> Outcome:
        """Simulate rounds, of which the first `warm_up` do not count."""
        simulated = [*self._rounds(rounds + warm_up)]
        tokens = sum(each.trained_tokens for each in simulated)
        completions = self.num_generations * sum(each.prompts for each in simulated)
        prompts = self._prompts.drawn or len(self.work.lengths)
        bias = tokens / max(1, completions) / self.work.mean_length(prompts, self.num_generations)
        return Outcome(simulated[warm_up:], self.schedule.rule.update_prompts, bias)

    def _rounds(self, number_of: int) -> Iterator[SimulatedRound]:
        """Draw a round and train on it; perhaps draw the next one meanwhile, with older weights."""
        lost = self.machine.slowdown - 1
        following: _Round | None = None
        for number in range(number_of):
            current = following or self._draw(number * self.steps)
            rollout, update = self._rollout(current), self._update(current)
            seconds = 0.0
            if self.schedule.ahead:
                seconds = 0.0 if number else rollout
                following = self._draw(number * self.steps, update)
                rollout = self._rollout(following)
                overlap = min(rollout, update)
            else:
                overlap = self._streamed(current, rollout, update)
            seconds += rollout + update + (lost - 1) * overlap
            figures = self._figures(current, number * self.steps, seconds, rollout, update)
            if self.turns is not None:  # tools run on while the engines rest
                self.turns.rest(figures.seconds - rollout)
            yield figures

    def _draw(self, version: int, beside: float = 0.0) -> _Round:
        for engine in self._engines:
            engine.begun.clear()
        rule, current = self.schedule.rule, _Round(self)
        groups = self._pool.plan(rule)
        assert groups, "the prompts never end"
        rollout = Rollout(self._session, groups, version, rule, current)
        if isinstance(rule, FirstReadyRound) and rule.most_age is not None:
            self.update_ends = self._engines[0].now() + beside
            rule.updating = lambda: rollout.trace.seconds < beside
        rollout.load_weights()
        rollout.run()
        current.state, current.result = rollout.state, rollout.result()
        current.trained = _samples(current.result.trained)
        self._pool.commit(current.result, rule)
        return current

    def _rollout(self, current: _Round) -> float:
        """Seconds until the last score that the round waits for."""
        trace, rewards = current.result.trace, self.costs.reward
        if rewards[-1] <= 0:
            return trace.seconds
        decoded = {f"{of}/{c.index}" for of, cs in current.state.finished.items() for c in cs}
        spans = zip(trace.spans["request"], trace.spans["end"], strict=True)
        ends = {name: end for name, end in spans if name in decoded}
        workers = [0.0] * (self.costs.reward_workers or len(ends))
        last = trace.seconds
        for name, end in sorted(ends.items(), key=lambda of: of[1]):
            took = rewards[stable_hash(name, "reward") % len(rewards)]
            scored = max(end, workers[0]) + took
            heapq.heapreplace(workers, scored)
            last = max(last, scored)
        return last

    def _update(self, current: _Round) -> float:
        selection, share = self.schedule.selection, self.costs.trained_share
        if selection is not None:
            share *= min(1.0, selection.keep / self.num_generations)
        positions = share * sum(map(len, current.trained))
        each = self.steps_per_round * self.costs.update + self.costs.position * positions
        return self.num_iterations * each

    def _streamed(self, current: _Round, rollout: float, update: float) -> float:
        """Seconds of gradients that are computed while others decode."""
        if (start := self.schedule.streaming) is None:
            return 0.0
        first = max(1, int(start * self.schedule.rule.update_prompts))
        total, beside = sum(map(len, current.trained)), 0.0
        groups = {group.id: group for group in current.result.trained}
        ready = [(at, groups[n]) for n, at in current.certain.items() if n in groups]
        at = ready[first - 1][0] if len(ready) >= first else rollout
        for moment, group in ready:
            if (at := max(at, moment)) >= rollout:
                break
            took = sum(map(len, _samples([group]))) / total * (update - self.costs.update)
            beside += min(max(0.0, took), rollout - at)
            at += took
        return beside

    def _figures(
        self, current: _Round, version: int, seconds: float, rollout: float, update: float
    ) -> SimulatedRound:
        trace, result, trained = current.result.trace, current.result, current.trained
        ages = Counter[float]()
        for sample in trained:
            for author, n in sample.completion.segments:
                if author != ENVIRONMENT:
                    ages[(version - author) / self.steps] += n
        stays = {group.id for group in (*result.trained, *result.left)}
        dropped = _samples([group for group in result.planned if group.id not in stays])
        around = self.costs.sync + self.costs.other + self.costs.verify * current.verified
        return SimulatedRound(
            seconds + around,
            rollout,
            update,
            around,
            trace.seconds,
            trace.decode_steps,
            trace.slot_steps,
            trace.slot_steps - trace.busy_slot_steps,
            len(trained) / self.num_generations,
            ages.total(),
            trace.tokens,
            result.discarded_tokens + sum(sample.completion.drawn for sample in dropped),
            int(max(trace.steps["kv_tokens"], default=0)),
            ages,
        )
