"""Goes through everything that a schedule may do with completions of a few tokens.

The rules, the rollout loop and the checks of early ends are those of a run; the engine is
simulated. A completion is not drawn: it has a law, which is narrowed to what the schedule sees of
it, with one case for each length (or reward) that it may have.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import length_hint
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from benchmarks import tabular
from benchmarks.tabular import Law, Tokens
from lit_rlsched.callbacks import DynamicSampling
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import DraftAudit
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import RoundRule, RoundState
from lit_rlsched.simulation.loop import PromptList, Visit, simulated_session
from lit_rlsched.training.selection import Pilot, Selection, Stop
from lit_rlsched.types import Completion, Group, Prompt, Request, Sampling

VOCAB = 3
LIMITS = {2: 3, 3: 2}
"""Tokens of a completion at most, by prompts of the task."""
T = TypeVar("T")


def reward(tokens: Tokens) -> float:
    """Return what the reward function gives: 1 for a completion that has the token 2."""
    return float(2 in tokens)


class Policy:
    """A table of logits `[prompts, prefixes, tokens]`."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.limit = logits, LIMITS[len(logits)]
        self.open = tabular.prefixes(VOCAB, self.limit)
        rows = logits.log_softmax(-1)
        self.tables = [Row(zip(self.open, of_prompt, strict=True)) for of_prompt in rows]
        self.laws = [tabular.sequences(table, self.limit) for table in self.tables]


class Row(dict[Tokens, Tensor]):
    """The table of a prompt, as a key of caches."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class Cases:
    """Goes through all ways in which a program that calls `choose` may run."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # the option that was taken, and their number
        self._depth = 0
        self.probability = 1.0

    def choose(self, options: Sequence[tuple[T, float]]) -> T:
        """Return one of the options, which have these probabilities."""
        if self._depth == len(self._path):
            self._path.append((0, len(options)))
        value, probability = options[self._path[self._depth][0]]
        self._depth += 1
        self.probability *= probability
        return value

    def __iter__(self) -> Iterator["Cases"]:
        while True:
            self._depth, self.probability = 0, 1.0
            yield self
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            taken, number = self._path[-1]
            self._path[-1] = taken + 1, number


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule and what has to be known of it."""

    rule: Callable[[], RoundRule]
    sees: Literal["nothing", "length", "reward", "both"] = "nothing"
    """What it sees of a completion before it decides."""
    generations: int = 2
    slots: int = 16
    ahead: bool = False
    """Whether a round is drawn by the policy before the one that is trained."""
    selection: Selection | None = None
    replacement: DynamicSampling | None = None
    pilot: int = 0
    """Completions that a prompt begins with; 0: all."""
    loss: tuple[tuple[str, Any], ...] = ()
    """Further arguments of `policy_loss`."""
    prompts: int = 2
    """Prompts of the task."""
    runs: tuple[tuple[int, ...], ...] = ((0, 1),)
    """Prompts of each run, in the order of the data; the runs are equally likely."""
    rounds: int | None = None
    """Rounds of a run; by default until no prompt is left."""


class Trained(NamedTuple):
    """A completion that is trained on."""

    prompt: int
    group: str
    law: Law
    spans: tuple[tuple[int, int], ...]
    """`(version, tokens)` of the tokens that earlier policies drew."""


@dataclass
class World:
    """One case: what each completion may be, given all that the schedule has seen of it."""

    schedule: Schedule
    cases: Cases
    policies: Sequence[Policy]
    """By version; the last one is that of all later versions."""
    version: int = 0
    laws: dict[str, Law] = field(default_factory=dict)
    """By request id."""
    _told: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Version and length, by request id."""

    def policy(self, version: int) -> Policy:
        """Return the policy of a version."""
        return self.policies[min(version, len(self.policies) - 1)]

    def __call__(self, request: Request) -> int:
        """Tell the engine the length of a request."""
        version, length = self._told.get(request.id, (-1, 0))
        cut = len(request.prefix_ids)
        if cut and version == self.version:
            return length
        prompt, newest = request.prompt_ids[0], self.policy(self.version)
        law: Law = newest.laws[prompt]
        if cut:
            begun: dict[Tokens, float] = defaultdict(float)
            for x, w in self.laws[request.id].items():
                begun[x[:cut]] += w
            law = tabular.completed(newest.tables[prompt], begun, newest.limit)
        return self._settle(request.id, {(x, cut): w for x, w in law.items()})[0]

    def _settle(self, name: str, law: dict[tuple[Tokens, int], float]) -> tuple[int, int]:
        """Choose what the schedule sees; return the length, and how many tokens are there."""
        sees = self.schedule.sees
        seen: dict[tuple[Any, ...], dict[Tokens, float]] = defaultdict(lambda: defaultdict(float))
        for (x, there), w in law.items():
            unseen = self.policies[0].limit, min(there, 1)
            length = (len(x), there) if sees in ("length", "both") else unseen
            seen[*length, reward(x) if sees in ("reward", "both") else None][x] += w
        options = [(key, sum(of.values())) for key, of in seen.items()]
        key = self.cases.choose([option for option in options if option[1] > 0])
        total = sum(seen[key].values())
        self.laws[name] = {x: w / total for x, w in seen[key].items()}
        self._told[name] = self.version, key[0]
        return key[0], key[1]

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        """Turn drafts into completions, as `training.draft_verifier` does."""
        for group, completion in ((g, c) for g in groups for c in g.completions if c.draft):
            draft, name = completion.draft, f"{group.id}/{completion.index}"
            assert draft is not None
            completion.draft, prompt = None, group.prompt.token_ids[0]
            p, q = (self.policy(v).tables[prompt] for v in (version, draft.versions[-1]))
            law: dict[tuple[Tokens, int], float] = defaultdict(float)
            for x, w in self.laws[name].items():
                begun, limit = x[: len(draft.token_ids)], self.policies[0].limit
                for result, share in _verified(p, q, begun, limit).items():
                    law[result] += w * share
            length, there = self._settle(name, law)
            completion.token_ids = array("i", [1] * there)
            completion.logprobs = array("d", [0.0] * there)
            completion.segments = [(version, there)]
            if there == length:
                completion.finish_reason = "stop"
        return DraftAudit()

    def rounds(self, prompts: Sequence[int]) -> Iterator[list[Trained]]:
        """Yield what each round trains on."""
        how, limit = self.schedule, self.policies[0].limit
        engine = SimulatedEngine(lengths=self, stream=False, length_only=True)
        session = simulated_session(engine, how.slots, limit + 1, lambda: Admission(how.slots))
        session.scorer = Scores(self)  # type: ignore[assignment]
        visits = [Visit(Prompt(f"{i}", "", (p,)), f"{i}") for i, p in enumerate(prompts)]
        pool, rule = Pool(Sampling(limit), how.generations, Prompts(visits)), how.rule()
        hooks, number = Hooks(self, pool, rule), 0
        while how.rounds is None or number < how.rounds:
            self.version = number
            rollout = Rollout(session, pool.plan(rule), number, rule, hooks)
            rollout.load_weights()
            rollout.run()
            result = rollout.result()
            if not result.planned:
                break
            pool.commit(result, rule)
            number += 1
            yield [
                Trained(group.prompt.token_ids[0], group.id, law, self._old(completion, number - 1))
                for group in result.trained
                for completion in group.completions
                if not completion.dropped
                for law in [self.laws[f"{group.id}/{completion.index}"]]
            ]
        session.close()

    def _old(self, completion: Completion, version: int) -> tuple[tuple[int, int], ...]:
        spans = completion.segments
        return tuple(span for span in spans if self.schedule.ahead or span[0] < version)


@cache
def _verified(p: Row, q: Row, draft: Tokens, limit: int) -> dict[tuple[Tokens, int], float]:
    """Whole sequences, and the number of tokens that the verification gives of them."""
    law: dict[tuple[Tokens, int], float] = defaultdict(float)
    for begun, share in tabular.verified(p, draft, 1.0, q).items():
        for y, w in tabular.completed(p, {begun: share}, limit).items():
            law[y, len(begun)] += w
    return law


class Hooks(RoundHooks):
    """The trainer's part: what replaces, stops and verifies."""

    def __init__(self, world: World, pool: Pool, rule: RoundRule) -> None:
        self._world, self._pool, self._rule = world, pool, rule
        selection, self._how = world.schedule.selection, world.schedule
        self.stop = Stop(selection, [1.0]) if selection and selection.reward_range else None
        self.replaces = self._how.replacement is not None
        if pilot := self._how.pilot:
            self.stop, self.pilot = Pilot(pilot, [1.0]), pilot

    def verify(self, groups: Sequence[Group], version: int) -> DraftAudit:
        return self._world.verify(groups, version)

    def another(self, group: Group, state: RoundState) -> Group | None:
        replacement, size = self._how.replacement, self._rule.update_prompts
        if not replacement or not replacement.replaces(group, len(state.due), size, [1.0]):
            return None
        return self._pool.replacement(group, state.planned, self._rule)


class Prompts(PromptList):
    """Prompts that may be replaced by the next ones."""

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        return length_hint(self._visits)


class Scores(Unscored):
    """Scores a completion by its law, which has a single reward if the schedule sees rewards."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        for group, completion in super().poll():
            law = self._world.laws[f"{group.id}/{completion.index}"]
            completion.scores = [reward(next(iter(law)))]
            yield group, completion
