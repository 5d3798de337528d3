"""A started engine and its scorer: what rollouts run on."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Protocol

from lit_rlsched.data.messages import ControlTokens
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.devices import give_back
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.turns import Turns
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.timeline import Timeline
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import UsageError

Sync = Callable[[int], Mapping[str, float]]
"""Copies the weights of a policy version to the engine and returns metrics."""


class Running(Protocol):
    """A `Rollout`, as far as the session knows it."""

    version: int

    @property
    def decodes(self) -> bool:
        """Whether it decodes at this moment."""

    def wait(self) -> None:
        """Wait for it, if it runs in a thread of its own."""

    def cancel(self) -> None:
        """End it before its next step."""


class RolloutSession:
    """Owns an engine from its start to its end, and what each rollout needs beside it.

    Args:
        engine: Engine that was not started yet.
        spec: What the engine needs to know of the run.
        scorer: Scores finished completions.
        sync: Called before every rollout, also under an unchanged version: a callback may have
            swapped weights for validation and back.
        admission: Creates the admission, which decides who takes a free slot of an engine; called
            each time the engine has started. By default requests take the slots in the order they
            come.
        seed: Part of every completion's seed.
    """

    lengths: CalibratedPredictor | None = None
    """Predicts the lengths of completions."""
    probe_tokens = 0
    """Tokens that a completion has when its length is predicted."""
    turns: Turns | None = None
    """Calls tools."""
    control_tokens: ControlTokens | None = None
    """Finds tokens of the chat template in the messages of rows."""

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        scorer: Scorer,
        sync: Sync = lambda version: {},
        admission: Callable[[], Admission] | None = None,
        *,
        seed: int,
    ) -> None:
        self.engine, self.spec, self.scorer, self.sync = engine, spec, scorer, sync
        self.seed = seed
        self.check_interrupt: Callable[[], None] = lambda: None
        """Called before each step of a rollout that the trainer waits for; may raise."""
        self.drops: Counter[str] = Counter()
        """Completions dropped since the run began, by reason."""
        self._admission = admission or (lambda: Admission(spec.slots // len(engine.engines)))
        self._rollout: Running | None = None
        try:
            self._start()
        except BaseException:
            engine.close()  # it may have started in part
            raise
        self.timeline = Timeline()
        """When the trainer and the engines work."""

    def _start(self) -> None:
        give_back(self.spec.device)
        self.engine.start(self.spec)
        self.worker = self.engine.make_worker(self._admission())

    @property
    def trace(self) -> RolloutTrace:
        """Trace of the current or last rollout."""
        return self.worker.trace

    def failures(self) -> Counter[str]:
        """Return failures of single completions since the run began, validation included."""
        drops = {f"dropped/{why}": count for why, count in self.drops.items()}
        return Counter(drops) + self.scorer.failures()

    def begin(self, rollout: Running) -> None:
        """Make room for a rollout: wait for one beside the update, drop any other one."""
        if self._rollout is not None:
            self._rollout.wait()
            self._rollout.cancel()
        self._rollout, self.scorer.version = rollout, rollout.version

    def restart(self, tensor_parallel_size: int) -> None:
        """Restart the engine with its model split over `tensor_parallel_size` devices.

        Only between rollouts; a rollout that did not run to its end is dropped. Nothing else is
        lost: the next rollout syncs the weights.

        Raises:
            UsageError: called during a rollout, such as in `on_completion_end`.
            UsageError: the engine does not start with this size, or its cache is too small for the
                slots.
        """
        if self._rollout is not None:
            if self._rollout.decodes:
                raise UsageError(
                    "The engine cannot restart during a rollout. Do it in `on_round_start` or "
                    "`on_round_end`."
                )
            self._rollout.cancel()
        self.engine.close()
        self.engine.tensor_parallel_size = tensor_parallel_size
        self._start()

    def close(self) -> None:
        """Close the engine and the reward workers, even if one of them fails to close."""
        with ExitStack() as stack:
            stack.callback(self.scorer.close)
            if self.turns is not None:
                stack.callback(self.turns.close)
            stack.callback(self.engine.close)
            if self._rollout is not None:
                stack.callback(self._rollout.cancel)
