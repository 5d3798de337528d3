"""Simulated rounds: the round loop of `fit` with a `SimulatedEngine` and without rewards."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.planner import RolloutBuffer, RoundPlanner
from lit_rlsched.rollout.round_runner import DrawnRound, RoundRunner
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
    """A source that yields each prompt once."""

    domains = (None,)

    def __init__(self, visits: Iterable[Visit]) -> None:
        self._visits = iter(visits)

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Visit]:
        return list(islice(self._visits, n))

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        return 0  # prompts are never replaced

    def state_dict(self) -> dict[str, Any]:
        return {}  # simulations are not resumed

    def load_state_dict(self, state: Any) -> None:
        pass


def simulated_session(
    engine: SimulatedEngine,
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
    return RolloutSession(
        engine,
        spec,
        scorer,
        admission=admission,
        seed=0,
        lengths=lengths,
        probe_tokens=probe_tokens,
    )


def simulated_rounds(
    session: RolloutSession,
    visits: Iterable[Visit],
    sampling: Sampling,
    num_generations: int,
    rules: Callable[[int], RoundRule],
    hooks: RoundHooks | None = None,
) -> Iterator[DrawnRound]:
    """Yield rounds until no prompt is left. Each round has its own policy version."""
    planner = RoundPlanner(RolloutBuffer(), sampling, num_generations)
    source: Any = PromptList(visits)
    planner.source = source
    runner = RoundRunner(planner)
    for number in count():
        drawn = runner.run(session, rules(number), number, number, hooks)
        if not drawn.planned:
            return
        runner.commit(drawn)
        yield drawn
