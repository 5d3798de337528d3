"""Rounds of completions whose lengths are known: the real rules and pool, decoded by `Engines`.

What ends when is exact: the same steps, slot-steps and waste as the round loop of `fit` has on
completions of these lengths, whatever the schedule (`tests/simulation/test_rounds.py`). Of drafts,
how many tokens the policy accepts is not known before, so a share of them is taken instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rlsched.rollout.audit import (
    Harvest,
    put_off_old,
    restart_stale,
    settle,
)
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.progress import Progress
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.simulation.decoder import Engines, Item
from lit_rlsched.simulation.loop import PromptList
from lit_rlsched.types import Completion, Event, Group, LengthOnly, Sample, Sampling, stable_hash

Length = Callable[[Sample], int]
"""Tokens of a completion, whenever it is drawn."""


@dataclass(slots=True)
class Drawn:
    """A round that was drawn."""

    planned: list[Group]
    harvest: Harvest
    turns: int
    """Decode steps."""
    slot_steps: int
    row_steps: int
    """Slot-steps in which a completion or a draft ran."""
    seconds: float
    """From the first step to the last."""
    prefilled: float
    peak_kv: int
    mean_kv: float
    """Mean tokens in the caches of all engines, over the decode steps."""
    verified: int
    """Positions of drafts, prompts included, that were verified before the round."""
    cut: int
    """Those of drafts that were not accepted whole."""
    intervenes: bool
    """Whether the loop decides between two steps which completions decode."""
    ended: dict[str, float]
    """Seconds of the round in which each request ended."""

    @property
    def trained(self) -> list[Sample]:
        """Completions that are trained on."""
        return [Sample(group, c) for group in self.harvest.trained for c in group.completions]

    @property
    def drawn_tokens(self) -> int:
        """Tokens of completions that were drawn until now, whatever became of them."""
        return sum(a.tokens for a in self.harvest.ran)


@dataclass
class SimulatedRounds:
    """Draws one round after the other."""

    source: Any
    length: Length
    engines: Engines
    sampling: Sampling
    num_generations: int
    expected: Callable[[Sample], float] | None = None
    longest_first: bool = True
    accepted: float = 1.0
    keeps_cache: bool = False
    planner: RoundPlanner = field(init=False)

    def __post_init__(self) -> None:
        self.planner = RoundPlanner(RolloutBuffer(), self.sampling, self.num_generations)
        source: Any = self.source if hasattr(self.source, "draw") else PromptList(self.source)
        self.planner.source = source

    def draw(self, rule: RoundRule, version: int) -> Drawn | None:
        """Draw a round and take it out of the pool; `None` if no prompt is left."""
        planner = self.planner
        groups = planner.plan(rule)
        if not groups:
            return None
        put_off_old(groups, version, rule)
        stale = restart_stale(groups, version, rule)
        verified = cut = 0
        for group in groups:
            of_drafts, of_cut = self._verify(group, version)
            verified, cut = verified + of_drafts, cut + of_cut
        decoding = _Decoding(self, groups, rule, version)
        decoding.run()
        engines = self.engines
        harvest = settle(groups, rule, decoding.state, stale)
        slots, seconds = engines.slots * len(engines), engines.seconds  # which counts all steps
        drawn = Drawn(
            groups,
            harvest,
            engines.turn,
            slots * engines.turn,
            engines.row_steps,
            seconds,
            engines.prefilled,
            engines.peak_kv,
            engines.kv_steps / max(1, engines.turn),
            verified,
            cut,
            decoding.intervenes,
            decoding.ended,
        )
        planner.pool.settle(groups, harvest.left)
        return drawn

    def _verify(self, group: Group, version: int) -> tuple[int, int]:
        """Turn the group's drafts into completions."""
        positions = cut = 0
        for completion in group.completions:
            if (draft := completion.draft) is None:
                continue
            completion.draft = None
            tokens, sample = len(draft.token_ids), Sample(group, completion)
            own = len(group.prompt.token_ids) + tokens
            positions += own
            chance = (stable_hash(sample.id, version) % 2**20) / 2**20
            if chance >= self.accepted:  # uniform in what is left of the interval
                cut += own
                tokens = int(tokens * (chance - self.accepted) / (1 - self.accepted))
            grow(completion, tokens, version, tokens >= self._total(sample, tokens))
        return positions, cut

    def _total(self, sample: Sample, least: int) -> int:
        """Tokens of a completion when it ends, `least` or more."""
        return min(max(self.length(sample), least), self.sampling.max_completion_length)

    def item(self, sample: Sample, later: bool = False) -> Item:
        """Return the rest of a completion as an item."""
        prefix = len(sample.completion.token_ids)
        limit = self.sampling.max_completion_length
        promised = float(limit - prefix)
        key = 0.0
        if self.expected is not None and not later:
            promised = self.expected(sample)
            key = -promised if self.longest_first else promised
        return Item(
            sample.id,
            sample.group.id,
            len(sample.group.prompt.token_ids) + prefix,
            prefix,
            self._total(sample, prefix + 1) - prefix,  # one that is resumed draws a token
            promised,
            limit,
            key,
            later,
            sample,
            self.keeps_cache and prefix > 0,
        )


def grow(completion: Completion, tokens: int, version: int, finished: bool) -> None:
    """Append tokens of a policy version to a completion."""
    new = LengthOnly(tokens)
    completion.take(Event("", new, new, "stop" if finished else None), version)


class _Decoding:
    """The part of `RolloutController.run` that decides, without engines, scores and seeds."""

    def __init__(
        self,
        rounds: SimulatedRounds,
        groups: list[Group],
        rule: RoundRule,
        version: int,
    ) -> None:
        self._rounds, self._rule, self._version = rounds, rule, version
        self._engines = engines = rounds.engines
        samples = [Sample(g, c) for g in groups for c in g.completions]
        self._progress = Progress(groups, patient=rule.patience is not None)
        self.state = self._progress.state
        self.ended: dict[str, float] = {}
        waiting = self.state.waiting = {group.id for group in rule.waiting(groups)}
        begun = [sample for sample in samples if sample.completion.finished]
        rest = [sample for sample in samples if not sample.completion.finished]
        rest.sort(key=lambda sample: not sample.completion.token_ids)
        slots = engines.slots * len(engines)
        waits = len(rest) > slots
        due = sum(sample.group.id not in waiting for sample in rest)
        intervenes = rounds.expected is not None and due > slots
        intervenes |= waits and (rule.stops_groups or engines.pauses_items)
        self.intervenes = intervenes
        engines.start_round(not rule.discards(self.state), ahead=not intervenes)
        self._live = {s.id: rounds.item(s, later=s.group.id in waiting) for s in rest}
        engines.submit([*self._live.values()])
        for sample in begun:
            self._count(sample)
        self._score(begun)

    def run(self) -> None:
        """Decode until the rule ends the round."""
        state, engines, live = self.state, self._engines, self._live
        while live and not self._rule.done(state):
            items = engines.step()
            state.final = len(state.decoded)
            finished = []
            for item in items:
                del live[item.id]
                self._take(item)
                finished.append(item.of)
            if len(finished) > 1:
                finished = self._progress.sorted(finished)
            for sample in finished:
                self._count(sample)
            self._score(finished)
        self._stop([*live.values()])
        state.patient = False

    def _take(self, item: Item) -> None:
        finished = item.drawn == item.tokens
        grow(item.of.completion, item.drawn, self._version, finished)
        if finished:
            self.ended[item.id] = item.time

    def _stop(self, items: Sequence[Item]) -> None:
        self._engines.stop(items)
        for item in items:
            self._live.pop(item.id, None)
            self._take(item)

    def _count(self, sample: Sample) -> None:
        """Record that a completion needs no more decoding."""
        self._progress.count(sample, self._engines.turn)

    def _score(self, samples: Sequence[Sample]) -> None:
        """Score completions at once, and stop groups that have enough."""
        for sample in samples:
            group, completion = sample.group, sample.completion
            if group.id not in self.state.waiting:
                completion.scores = completion.scores or []
            if not self._rule.stops_groups or all(c is not completion for c in group.completions):
                continue  # or the group was stopped without it
            if (kept := self._rule.enough(group, self.state)) is not None:
                rest = [Sample(group, c) for c in group.completions if not c.finished]
                self._stop([self._live[s.id] for s in rest if s.id in self._live])
                for other in rest:
                    self._count(other)
                self._progress.keep(group, kept)
