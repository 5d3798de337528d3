"""Run recorded or drawn lengths under another schedule, on a virtual clock."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.engines.worker import RolloutWorker
from lit_rlsched.rollout.audit import DraftAudit, Harvest, restart_stale, settle
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.scheduling.admission import Admission, Refill
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.length_prediction import LengthPredictor, Oracle
from lit_rlsched.scheduling.planning import lower_bound
from lit_rlsched.scheduling.queues import Order
from lit_rlsched.scheduling.recorded_lengths import RecordedCompletions
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Completion, Group, Sample


@dataclass(frozen=True)
class Schedule:
    """One row of the comparison."""

    name: str
    refill: Refill = "continuous"
    order: Order = "fifo"
    predictor: Callable[[dict[str, int]], LengthPredictor] | None = None
    """Made for each workload, from its true lengths, which only `Oracle` takes."""
    probe_tokens: int = 0


@dataclass
class Replayed:
    """What a schedule needed for a workload."""

    decode_steps: int
    traces: list[RolloutTrace]
    metrics: list[dict[str, float]]
    """Of the predictor, a round each."""


class Unscored:
    """Stands in for the scorer: a schedule does not depend on rewards."""

    def __init__(self) -> None:
        self._finished: list[tuple[Group, Completion]] = []

    @property
    def pending(self) -> int:
        return len(self._finished)

    def wait(self, timeout: float | None = None) -> None:
        pass

    def submit(self, group: Group, completion: Completion) -> None:
        self._finished.append((group, completion))

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        finished, self._finished = self._finished, []
        for group, completion in finished:
            completion.scores = []
            yield group, completion

    def cancel(self, group: Group | None = None) -> None:
        self._finished = [(g, c) for g, c in self._finished if group and g is not group]


class Drawn(NamedTuple):
    """A round that was drawn and settled."""

    plan: list[Group]
    begun: dict[str, int]
    """Tokens that each completion had before it."""
    harvest: Harvest
    trace: RolloutTrace


Verify = Callable[[Sequence[Group], int], DraftAudit]
"""Turns the drafts of groups into completions of a policy version."""


def draw_rounds(
    source: Iterator[Group],
    policy: RoundRule,
    controller: RolloutController,
    verify: Verify = lambda groups, version: DraftAudit(),
) -> Iterator[Drawn]:
    """A run's rounds, a policy version each, until the source is empty and all is trained on."""
    pool = RolloutBuffer()
    for version in count():
        for group in islice(source, policy.fresh_prompts(list(pool))):
            pool.add(group)
        plan = list(policy.plan(list(pool)))
        if not plan:
            return
        dropped = restart_stale(plan, version, policy)
        audit = verify(plan, version)
        begun = {Sample(g, c).id: len(c.token_ids) for g in plan for c in g.completions}
        trace = controller.worker.start_trace()
        for _ in controller.run(plan, policy, version):
            pass
        harvest = settle(plan, policy, controller.state, dropped)
        harvest.drafts = audit
        pool.settle(plan, harvest.left)
        yield Drawn(plan, begun, harvest, trace)


def least_steps(rounds: Sequence[Sequence[Group]], slots: int) -> int:
    """Fewest decode steps any schedule could need, round by round."""
    lengths = ([len(c.token_ids) for g in groups for c in g.completions] for groups in rounds)
    return sum(int(lower_bound(of_round, slots)) for of_round in lengths)


def oracle(lengths: dict[str, int]) -> LengthPredictor:
    """The predictor that knows."""
    return Oracle(lengths)


def replay(rounds: Sequence[Sequence[Group]], schedule: Schedule, slots: int) -> Replayed:
    """Draw the rounds' completions once more, in the order of a schedule.

    Args:
        rounds: Groups whose completions say what is drawn.
        schedule: Who goes first.
        slots: Most completions that decode at once.
    """
    recorded = {
        Sample(g, c).id: c.token_ids for groups in rounds for g in groups for c in g.completions
    }
    engine = SimulatedEngine(lengths=RecordedCompletions(recorded), stream=False)
    longest = max(
        len(g.prompt.token_ids) + g.sampling.max_completion_length for r in rounds for g in r
    )
    engine.start(EngineSpec("", slots=slots, max_model_len=longest, eos_token_ids=(0,)))
    lengths = None
    if schedule.predictor is not None:
        lengths = CalibratedPredictor(
            schedule.predictor({name: len(ids) for name, ids in recorded.items()})
        )
    worker = RolloutWorker(engine, Admission(slots, schedule.refill, schedule.order))
    controller = RolloutController(
        worker,
        Unscored(),  # type: ignore[arg-type]
        seed=0,
        lengths=lengths,
        probe_tokens=schedule.probe_tokens,
    )
    replayed = Replayed(0, [], [])
    for version, groups in enumerate(rounds):
        plan = [
            Group(g.id, g.prompt, g.sampling, [Completion(c.index) for c in g.completions])
            for g in groups
        ]
        worker.start_trace()
        for _ in controller.run(plan, FullRound(len(plan)), version, predict=True):
            pass
        replayed.traces.append(worker.trace)
        replayed.decode_steps += worker.trace.decode_steps
        replayed.metrics.append({} if lengths is None else lengths.end_round())
    return replayed
