"""A started engine with what scores its completions: rollouts under the weights of the moment."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from inspect import GEN_RUNNING, getgeneratorstate

from lit_rlsched.engines.base import EngineSpec, RolloutEngine, give_back
from lit_rlsched.rollout.controller import Feedback, RolloutController
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Completion, Group

Sync = Callable[[int], Mapping[str, float]]
"""Brings the engine to the weights of a policy version; gives what it measured."""


class RolloutSession:
    """Draws and scores completions; the engine has the weights of the moment.

    Args:
        engine: An engine that was not started yet; the session starts and closes it.
        spec: What the engine needs to know.
        admission: Makes, each time the engine has started, what decides which request takes a free
            slot.
        scorer: Scores finished completions.
        sync: Called before every rollout, also under the same version: a callback may have swapped
            weights for validation and back.
        seed: The run's seed.
        lengths: See `RolloutController`.
        probe_tokens: See `RolloutController`.
        on_completion: See `RolloutController`.
        on_group: See `RolloutController`.
        heed: See `RolloutController`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        admission: Callable[[], Admission],
        scorer: Scorer,
        sync: Sync = lambda version: {},
        *,
        seed: int,
        lengths: CalibratedPredictor | None = None,
        probe_tokens: int = 0,
        on_completion: Callable[[Completion], None] = lambda completion: None,
        on_group: Callable[[Group], None] = lambda group: None,
        heed: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.scorer = scorer
        self._sync = sync
        self._synced: Mapping[str, float] = {}
        self._admission = admission
        self._rollout: Generator[Group, None, None] = (g for g in list[Group]())
        try:
            give_back(spec.device)
            engine.start(spec)
            worker = engine.make_worker(admission())
        except BaseException:
            engine.close()  # nobody else knows that it may have begun
            raise
        self.controller = RolloutController(
            worker,
            scorer,
            seed=seed,
            lengths=lengths,
            probe_tokens=probe_tokens,
            on_completion=on_completion,
            on_group=on_group,
            heed=heed,
        )

    @property
    def trace(self) -> RolloutTrace:
        """What ran when, in the last or current rollout."""
        return self.controller.worker.trace

    def failures(self) -> Counter[str]:
        """What went wrong with single completions until now, validation included."""
        drops = {f"dropped/{why}": count for why, count in self.controller.drops.items()}
        return Counter(drops) + self.scorer.failures()

    def metrics(self) -> dict[str, float]:
        """What the last rollout met beside its trace: waits, restarts, the last sync."""
        figures: dict[str, float] = {}
        if self.controller.waits_for_scores:
            figures["rollout/score_wait_seconds"] = self.controller.waited
        return figures | self.controller.worker.metrics() | dict(self._synced)

    def rollout(
        self,
        groups: Sequence[Group],
        version: int,
        rule: RoundRule | None = None,
        salt: str = "",
        predict: bool = False,
        feedback: Feedback | None = None,
    ) -> Generator[Group, None, None]:
        """Bring the engine to the weights of `version`, run `groups`, yield them as they complete.

        `salt`, `predict` and `feedback` are those of `RolloutController.run`. A rollout that was
        not run to its end is dropped when the next one starts.
        """
        self._rollout.close()
        rule = rule or FullRound(len(groups))
        self._rollout = self._run(
            version, self.controller.run(groups, rule, version, salt, predict, feedback)
        )
        return self._rollout

    def _run(self, version: int, groups: Iterator[Group]) -> Generator[Group, None, None]:
        give_back(self.spec.device)
        self.engine.wake()
        try:
            self._synced = self._sync(version)
            self.controller.worker.start_trace()
            yield from groups
        finally:
            self.engine.sleep()

    def restart(self, tensor_parallel_size: int) -> None:
        """Start the engine anew, with its model split over so many devices.

        Between rollouts only; one that was not run to its end is dropped. What waits is in the
        pool, and the weights come with the next rollout, so nothing else is lost.

        Raises:
            RuntimeError: a rollout waits for the caller, as in `on_completion_end`.
            ValueError: the engine does not start like that, or has too little cache for the slots.
        """
        if getgeneratorstate(self._rollout) == GEN_RUNNING:
            raise RuntimeError(
                "The engine cannot start anew inside a rollout. Do it in `on_round_start` or "
                "`on_round_end`."
            )
        self._rollout.close()
        self.engine.close()
        self.engine.tensor_parallel_size = tensor_parallel_size
        give_back(self.spec.device)
        self.engine.start(self.spec)
        self.controller.worker = self.engine.make_worker(self._admission())

    def close(self) -> None:
        """Free the engine and the reward workers, whatever else goes wrong."""
        with ExitStack() as stack:
            stack.callback(self.scorer.close)
            stack.callback(self.engine.close)
            stack.callback(self._rollout.close)
