"""Replay recorded completions under another schedule, on a virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission, Refill
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.length_prediction import LengthPredictor
from lit_rlsched.scheduling.planning import lower_bound
from lit_rlsched.scheduling.queues import Order
from lit_rlsched.scheduling.recorded_lengths import RecordedCompletions
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.speculation import Drafting, DraftTokens
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
    """Makes the predictor of a replay from the true lengths, which only `Oracle` uses."""
    probe_tokens: int = 0


@dataclass
class Replayed:
    """Result of a replay."""

    decode_steps: int
    traces: list[RolloutTrace]
    metrics: list[dict[str, float]]
    """Metrics of the predictor in each round."""


def least_steps(rounds: Sequence[Sequence[Group]], slots: int) -> int:
    """Lower bound of the decode steps of any schedule, over all rounds."""
    lengths = ([len(c.token_ids) for g in groups for c in g.completions] for groups in rounds)
    return sum(int(lower_bound(of_round, slots)) for of_round in lengths)


def replay(rounds: Sequence[Sequence[Group]], schedule: Schedule, slots: int) -> Replayed:
    """Draw the completions of recorded rounds again under a schedule.

    Args:
        rounds: Groups of each round, with their completions.
        schedule: How they are scheduled.
        slots: Maximum number of completions that decode at once.
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
    replayed = Replayed(0, [], [])
    drawn_rounds = simulated_rounds(
        session,
        (Visit(g.prompt, g.id) for g in groups),
        groups[0].sampling,
        len(groups[0].completions),
        lambda number: FullRound(len(rounds[min(number, len(rounds) - 1)])),
    )
    for drawn in drawn_rounds:
        replayed.traces.append(drawn.trace)
        replayed.decode_steps += drawn.trace.decode_steps
        replayed.metrics.append(drawn.metrics if lengths is not None else {})
    return replayed


class Drafted(NamedTuple):
    """Recorded completions, decoded again on paper."""

    steps: int
    """Decode steps with draft tokens."""
    plain: int
    """Decode steps without."""
    tokens: int
    """Tokens of the completions."""
    row_steps: int
    """Running requests, summed over the steps."""
    proposed: int
    accepted: int


def drafted_round(groups: Sequence[Group], slots: int, drafting: Drafting) -> Drafted:
    """Count the decode steps of a round, whose completions begin in their order."""
    plain, _ = _decode(groups, slots, None)
    drafts = DraftTokens(drafting)
    steps, row_steps = _decode(groups, slots, drafts)
    tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    return Drafted(steps, plain, tokens, row_steps, drafts.counts.proposed, drafts.counts.accepted)


def _decode(groups: Sequence[Group], slots: int, drafts: DraftTokens | None) -> tuple[int, int]:
    """Return decode steps and row-steps of an engine that always fills its slots."""
    waiting: list[tuple[str, Group, Sequence[int]]] = [
        (f"{group.id}/{completion.index}", group, completion.token_ids)
        for group in reversed(groups)
        for completion in reversed(group.completions)
    ]
    running: dict[str, tuple[Group, Sequence[int], int]] = {}  # with the number that are drawn
    steps = row_steps = 0
    while waiting or running:
        while waiting and len(running) < slots:
            name, group, tokens = waiting.pop()
            running[name] = group, tokens, 0
        proposed = {} if drafts is None else drafts.propose([*running])
        steps += 1
        row_steps += len(running)
        for name, (group, tokens, at) in list(running.items()):
            new = tokens[at : at + 1 + agreeing(proposed.get(name, ()), tokens[at:])]
            end = at + len(new)
            running[name] = group, tokens, end
            if drafts is not None:
                if at == 0:  # known from its first token on
                    most = group.sampling.max_completion_length
                    drafts.enter(name, group.id, group.prompt.token_ids, most)
                drafts.take(name, new)
            if end == len(tokens):
                del running[name]
                if drafts is not None:
                    drafts.leave(name)
    return steps, row_steps


def agreeing(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(drafted, tokens, strict=False)
    same = next((i for i, (draft, token) in enumerate(pairs) if draft != token), None)
    return min(len(drafted), len(tokens)) if same is None else same
