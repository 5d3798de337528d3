"""Run recorded or drawn lengths under another schedule, on a virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission, Refill
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.length_prediction import LengthPredictor
from lit_rlsched.scheduling.planning import lower_bound
from lit_rlsched.scheduling.queues import Order
from lit_rlsched.scheduling.recorded_lengths import Oracle, RecordedCompletions
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.simulate.rounds import Visit, simulated_rounds, simulated_session
from lit_rlsched.types import Group, Sample


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
    longest = max(
        len(g.prompt.token_ids) + g.sampling.max_completion_length for r in rounds for g in r
    )
    lengths = None
    if schedule.predictor is not None:
        lengths = CalibratedPredictor(
            schedule.predictor({name: len(ids) for name, ids in recorded.items()})
        )
    session = simulated_session(
        SimulatedEngine(lengths=RecordedCompletions(recorded), stream=False),
        slots,
        longest,
        lambda: Admission(slots, schedule.refill, schedule.order),
        lengths,
        schedule.probe_tokens,
    )
    replayed = Replayed(0, [], [])
    first = rounds[0][0]
    drawn_rounds = simulated_rounds(
        session,
        (Visit(g.prompt, g.id) for groups in rounds for g in groups),
        first.sampling,
        len(first.completions),
        lambda number: FullRound(len(rounds[min(number, len(rounds) - 1)])),
    )
    for drawn in drawn_rounds:
        replayed.traces.append(drawn.trace)
        replayed.decode_steps += drawn.trace.decode_steps
        replayed.metrics.append(drawn.metrics if lengths is not None else {})
    return replayed
