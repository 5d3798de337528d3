"""Rounds of a simulated run: the loop that `fit` runs, with a `SimulatedEngine` and no rewards."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.buffer import RolloutBuffer
from lit_rlsched.rollout.planner import RoundPlanner
from lit_rlsched.rollout.round_runner import DrawnRound, RoundRunner, Verify, Watchers, no_drafts
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.round_rule import RoundRule
from lit_rlsched.types import Completion, Group, Prompt, Sampling


class Unscored:
    """Stands in for the scorer where a schedule does not depend on rewards."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._finished: list[tuple[Group, Completion]] = []

    @property
    def pending(self) -> int:
        """Completions that `poll` has not given back."""
        return len(self._finished)

    def wait(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""

    def submit(self, group: Group, completion: Completion) -> None:
        """Take a finished completion."""
        self._finished.append((group, completion))

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        """Each completion with an empty list of scores."""
        finished, self._finished = self._finished, []
        for group, completion in finished:
            completion.scores = []
            yield group, completion

    def cancel(self, group: Group | None = None) -> None:
        """Forget what is pending, or what is pending of a group."""
        self._finished = [(g, c) for g, c in self._finished if group and g is not group]

    def failures(self) -> dict[str, int]:
        """None."""
        return {}

    def close(self) -> None:
        """There are no workers."""


class Visit(NamedTuple):
    """A prompt, and the id of the group that is made of it."""

    prompt: Prompt
    key: str


class PromptList:
    """Prompts one after the other, each once.

    Args:
        visits: As many as there are; they may never end.
    """

    domains = (None,)

    def __init__(self, visits: Iterable[Visit]) -> None:
        self._visits = iter(visits)

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Visit]:
        """The next `n`, or what is left."""
        return list(islice(self._visits, n))

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        """None that could take the place of another."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """A simulation is not resumed."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """A simulation is not resumed."""


def simulated_session(
    engine: SimulatedEngine,
    slots: int,
    longest: int,
    admission: Callable[[], Admission],
    lengths: CalibratedPredictor | None = None,
    probe_tokens: int = 0,
) -> RolloutSession:
    """A session without weights and rewards.

    Args:
        engine: Not started yet.
        slots: Most completions that decode at once.
        longest: Tokens of the longest prompt and completion together.
        admission: Which request takes a free slot.
        lengths: See `RolloutController`.
        probe_tokens: See `RolloutController`.
    """
    nothing: Any = None  # no dtype and no device: nothing is computed
    spec = EngineSpec("", slots, longest, (0,), dtype=nothing, device=nothing)
    scorer: Any = Unscored()
    return RolloutSession(
        engine, spec, admission, scorer, seed=0, lengths=lengths, probe_tokens=probe_tokens
    )


def simulated_rounds(
    session: RolloutSession,
    visits: Iterable[Visit],
    sampling: Sampling,
    num_generations: int,
    rules: Callable[[int], RoundRule],
    verify: Verify = no_drafts,
) -> Iterator[DrawnRound]:
    """A run's rounds, a policy version each, until no prompt is left.

    Args:
        session: What `simulated_session` gave.
        visits: Prompts in the order in which they are drawn.
        sampling: Of all of them.
        num_generations: Completions of a prompt that are trained on.
        rules: The rule of each round, by its number.
        verify: What becomes of drafts.
    """
    planner = RoundPlanner(RolloutBuffer(), sampling, num_generations)
    planner.source = PromptList(visits)
    runner = RoundRunner(planner)
    for number in count():
        drawn = runner.run(
            session, rules(number), number, number, lambda groups: Watchers(verify=verify)
        )
        if not drawn.planned:
            return
        runner.commit(drawn)
        yield drawn
