"""Simulated rounds: the round loop of `fit` with a `SimulatedEngine` and without rewards."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.pool import Pool
from lit_rlsched.rollout.result import RoundResult
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.types import Prompt, Sampling


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

    def draw(
        self,
        n: int,
        besides: Collection[str] = (),
        domain: str | None = None,
        chooser: Any = None,
    ) -> list[Visit]:
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
        if session.lengths is not None:
            session.lengths.statistics.observe(number, result.trained)
        yield result
