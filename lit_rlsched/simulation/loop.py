"""Simulated rounds: the round loop of `fit` with a `SimulatedEngine` and without rewards.

With it, `recommend_slots` chooses the number of slots for `SortedBatching`.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Literal, NamedTuple

import numpy as np

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.planning import Steps
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.settings import UsageError
from lit_rlsched.types import LengthOnly, Prompt, Sampling

Mode = Literal["on_policy", "partial"]
Lengths = Steps | Sequence[Sequence[float]]


class Visit(NamedTuple):
    """A prompt, and the id of the group that is made of it."""

    prompt: Prompt
    key: str


class PromptList:
    """A source that yields each prompt once. Simulations replace none, and are not resumed."""

    def __init__(self, visits: Iterable[Visit]) -> None:
        self._visits = iter(visits)
        self.drawn = 0
        """Prompts drawn so far."""

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Visit]:
        visits = list(islice(self._visits, n))
        self.drawn += len(visits)
        return visits


def simulated_session(
    engine: RolloutEngine,
    slots: int,
    longest: int,
    admission: Callable[[], Admission],
    lengths: CalibratedPredictor | None = None,
    probe_tokens: int = 0,
) -> RolloutSession:
    """Make a session without weights and rewards."""
    nothing: Any = None  # neither a dtype nor a device is needed
    spec = EngineSpec("", slots, longest, (0,), dtype=nothing, device=nothing)
    scorer: Any = Unscored()
    session = RolloutSession(engine, spec, scorer, admission=admission, seed=0)
    session.lengths, session.probe_tokens = lengths, probe_tokens
    return session


def simulated_rounds(
    session: RolloutSession,
    visits: Iterable[Visit],
    sampling: Sampling,
    num_generations: int,
    rules: Callable[[int], RoundRule],
) -> Iterator[RoundResult]:
    """Yield rounds until no prompt is left. Each round has its own policy version."""
    pool = Pool(sampling, num_generations, PromptList(visits))
    for number in count():
        rule = rules(number)
        rollout = Rollout(session, pool.plan(rule), number, rule)
        rollout.load_weights()
        rollout.run()
        result = rollout.result()
        if not result.planned:
            return
        pool.commit(result, rule)
        yield result


def recommend_slots(
    lengths: Lengths,
    update: int,
    bubble_ratio: float = 0.05,
    mode: Mode = "on_policy",
    max_completion_length: int | None = None,
) -> int:
    """Number of slots with which a pool idles no more than `bubble_ratio`.

    Bisection finds a number that keeps to the target while one more slot does not. Each number that
    it tries simulates the whole pool, which takes 0.2 seconds for 4,000 completions. At most as
    many slots as completions are considered. See `docs/explanation/sorted_rl.md` for a number that
    is safe for any pool.
    """
    if not 0 <= bubble_ratio < 1:
        raise UsageError(f"`bubble_ratio={bubble_ratio}`: use 0 or more, and less than 1.")

    def idles(slots: int) -> bool:
        return pool_bubble_ratio(lengths, update, slots, mode, max_completion_length) > bubble_ratio

    most = max(1, np.size(lengths))
    if not idles(most):
        return most
    return 1 + bisect_left(range(2, most), True, key=idles)  # a single slot never idles


def pool_bubble_ratio(
    lengths: Lengths,
    update: int,
    slots: int,
    mode: Mode = "on_policy",
    max_completion_length: int | None = None,
) -> float:
    """Idle slot-steps over all slot-steps of a pool, with its last drain.

    Equation 4 of SortedRL (arXiv 2603.23414) with `slots` as Q and a decode step as the unit of
    time. A completion has the same length each time it is drawn. Slot-steps whose tokens are thrown
    away later do not count as idle.
    """
    for name, value in (("update", update), ("slots", slots)):
        if value < 1:
            raise UsageError(f"`{name}={value}`: use 1 or more.")
    rows = np.asarray(lengths)
    if not rows.size or rows.ndim > 2:
        raise UsageError(
            f"`lengths` has the shape {rows.shape}: give one per completion, or one row per group."
        )
    limit = max_completion_length or np.ceil(rows.max())
    if not (rows.min() >= 1 and rows.max() <= limit):
        raise UsageError(
            f"`lengths` has values from {rows.min()} to {rows.max()}: a completion has 1 token or "
            f"more, and no more than `{max_completion_length=}`."
        )
    groups = np.ceil(rows).astype(int).reshape(len(rows), -1).tolist()
    visits = [Visit(Prompt(str(i), "", LengthOnly(1)), str(i)) for i in range(len(groups))]  # type: ignore[arg-type]
    known = {f"{i}/{j}": n for i, of in enumerate(groups) for j, n in enumerate(of)}
    session = simulated_session(
        SimulatedEngine(known, length_only=True, stream=False),
        slots,
        int(limit) + 1,
        lambda: Admission(slots),
    )
    rule, sizes = SortedRound(update, len(groups), len(groups[0]), "group", mode), len(groups[0])
    rounds = simulated_rounds(session, visits, Sampling(int(limit)), sizes, lambda number: rule)
    traces = [drawn.trace for drawn in rounds]
    total = sum(trace.slot_steps for trace in traces)
    return (total - sum(trace.busy_slot_steps for trace in traces)) / total
