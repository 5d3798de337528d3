"""The worker between the round loop and an engine: refills free slots and records each step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.types import Event, Request


class Worker(ABC):
    """Keeps the slots of one engine or several filled, in this process or in the engine's."""

    def __init__(self, admission: Admission, engines: int = 1) -> None:
        self.admission = admission
        self.slots = engines * admission.slots
        """Maximum number of requests that decode at once."""
        self._engines = engines
        self.trace = self._new_trace()
        """What ran when, in the last or current rollout."""

    def _new_trace(self) -> RolloutTrace:
        dynamic = self.admission.budget is not None
        return RolloutTrace(self.slots, dynamic=dynamic, engines=self._engines)

    def start_trace(self) -> RolloutTrace:
        """Begin a new trace; nothing may be running."""
        assert not self.busy, "a trace begins between rollouts"
        self.trace = self._new_trace()
        return self.trace

    def may_wait(self, requests: int) -> bool:
        """Return whether some of this number of requests may have to wait for a slot."""
        return requests > self.slots or self.admission.budget is not None

    def metrics(self) -> dict[str, float]:
        """`rollout/*` metrics of the rollout that do not follow from the trace."""
        return {}

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether any request runs or waits."""

    @abstractmethod
    def start_round(self, ahead: bool, version: int = 0) -> None:
        """Set what holds for the round whose requests are submitted next.

        Args:
            ahead: Whether a worker in the engine's process may keep stepping without being asked,
                because the caller changes nothing of other requests between two steps.
            version: Policy version of the engine's weights.
        """

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests for a slot."""

    @abstractmethod
    def step(self) -> list[Event]:
        """Refill the free slots and step the engine.

        A request that reached its `pause_at` has the finish reason `paused`. The worker forgets it;
        it resumes when it is submitted again.
        """

    @abstractmethod
    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests, or all; return the known tokens that no event has reported yet."""


class EngineWorker(Worker):
    """Worker of a single engine, alone or as one of several in a `PoolWorker`."""

    running: Collection[str]
    """Ids of the requests that have a slot."""

    @abstractmethod
    def begin(self) -> int:
        """Do the part of the next step that need not wait for the engine.

        Return the maximum number of decode steps; 1 if the engine cannot skip any.
        """

    @abstractmethod
    def advance(self, most: int | None = None) -> Step:
        """Like `step`, of `most` decode steps at most, and not recorded in the trace."""

    def allow(self, steps: int | None) -> None:
        """Let a worker that runs ahead make so many steps before the next call; None: any number.

        Unused steps of an engine without requests are lost.
        """

    def stop(self) -> None:
        """Tell a worker that runs ahead to stop, without waiting for it; `abort` follows."""

    def step(self) -> list[Event]:
        step = self.advance()
        self.trace.take(step)
        return step.events
