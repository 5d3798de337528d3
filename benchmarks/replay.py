"""Replay recorded completions under another schedule, on a virtual clock."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.scheduling.admission import Admission, Order, Refill
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor, LengthPredictor
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.types import Group, Request, Sample


class RecordedCompletions:
    """Recorded completions, to be drawn again token by token."""

    def __init__(self, token_ids: Mapping[str, Sequence[int]]) -> None:
        self._token_ids = token_ids

    def __call__(self, request: Request) -> int:
        return len(self.token_ids(request))

    def token_ids(self, request: Request) -> Sequence[int]:
        """All tokens of the request's completion, its prefix included."""
        return self._token_ids[request.id]


@dataclass(frozen=True)
class Schedule:
    """How completions are admitted."""

    refill: Refill = "continuous"
    order: Order = "fifo"
    predictor: Callable[[dict[str, int]], LengthPredictor] | None = None
    """Makes the predictor of a replay from the true lengths, which only `Oracle` uses."""
    probe_tokens: int = 0


def replayed_rounds(
    rounds: Sequence[Sequence[Group]],
    schedule: Schedule,
    slots: int,
    rule: RoundRule | None = None,
) -> Iterator[RoundResult]:
    """Yield recorded rounds as they are drawn again under a schedule.

    Args:
        rounds: Groups of each round, with their completions.
        schedule: How they are scheduled.
        slots: Maximum number of completions that decode at once.
        rule: Rule of all rounds. By default each takes the prompts of a recorded round.
    """
    groups = [group for of_round in rounds for group in of_round]
    recorded = {Sample(g, c).id: c.token_ids for g in groups for c in g.completions}
    longest = max(len(g.prompt.token_ids) + g.sampling.max_completion_length for g in groups)
    lengths = None
    if schedule.predictor is not None:
        true_lengths = {name: len(token_ids) for name, token_ids in recorded.items()}
        lengths = CalibratedPredictor(schedule.predictor(true_lengths))
    session = simulated_session(
        SimulatedEngine(lengths=RecordedCompletions(recorded), stream=False),
        slots,
        longest,
        lambda: Admission(slots, schedule.refill, schedule.order),
        lengths,
        schedule.probe_tokens,
    )
    return simulated_rounds(
        session,
        (Visit(g.prompt, g.id) for g in groups),
        groups[0].sampling,
        len(groups[0].completions),
        lambda number: rule or FullRound(len(rounds[min(number, len(rounds) - 1)])),
    )
