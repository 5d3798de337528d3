"""A started engine and its scorer: rollouts under the current weights."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, TypeVar, cast

from lit_rlsched.data.messages import ControlTokens
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.devices import give_back
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.scoring import Feedback, Scorer
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.timeline import ENGINES, REWARDS, TRAINER, WEIGHTS, Timeline
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group

T = TypeVar("T")
Sync = Callable[[int], Mapping[str, float]]
"""Copies the weights of a policy version to the engine and returns metrics."""


class RolloutSession:
    """Runs rollouts on an engine that it owns.

    Args:
        engine: Engine that was not started yet.
        spec: What the engine needs to know of the run.
        scorer: Scores finished completions.
        sync: Called before every rollout, also under an unchanged version: a callback may have
            swapped weights for validation and back.
        admission: Creates the admission, which decides who takes a free slot of an engine; called
            each time the engine has started. By default requests take the slots in the order they
            come.
        on_completion: Called with each completion once it is scored.
        on_group: Called with each group once all of its completions are scored.
        heed: See `RolloutController`.
        control_tokens: Finds tokens of the chat template in the messages of rows.
        **controller: Further arguments of `RolloutController`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        scorer: Scorer,
        sync: Sync = lambda version: {},
        admission: Callable[[], Admission] | None = None,
        *,
        on_completion: Callable[[Completion], None] = lambda completion: None,
        on_group: Callable[[Group], None] = lambda group: None,
        heed: Callable[[], None] = lambda: None,
        control_tokens: ControlTokens | None = None,
        **controller: Any,
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.scorer = scorer
        self.control_tokens = control_tokens
        self._sync = sync
        self._synced: Mapping[str, float] = {}
        self._admission = admission or (lambda: Admission(spec.slots // len(engine.engines)))
        self._rollout: Generator[Group | None, None, None] = (g for g in list[Group]())
        self.background = background = Background(heed)
        """Runs rollouts beside the trainer."""
        self._watch: Callable[[Completion], None] | None = None
        try:
            give_back(spec.device)
            engine.start(spec)
            worker = engine.make_worker(self._admission())
            self.controller = RolloutController(
                worker,
                scorer,
                on_completion=background.kept(lambda c: (self._watch or on_completion)(c)),
                on_group=background.kept(lambda g: None if self._watch else on_group(g)),
                heed=background.heed,
                **controller,
            )
        except BaseException:
            engine.close()  # it may have started in part
            raise
        self.timeline = Timeline()
        """When the trainer and the engines work."""
        self.rollout_ended = self.timeline.now()
        """When the trainer last ceased to wait for a rollout that was not in the background."""

    @property
    def trace(self) -> RolloutTrace:
        """Trace of the current or last rollout."""
        return self.controller.worker.trace

    def failures(self) -> Counter[str]:
        """Return failures of single completions since the run began, validation included."""
        drops = {f"dropped/{why}": count for why, count in self.controller.drops.items()}
        return Counter(drops) + self.scorer.failures()

    def metrics(self) -> dict[str, float]:
        """Return the last rollout's metrics beside its trace: waits and last sync."""
        controller, metrics = self.controller, dict[str, float]()
        if controller.waits_for_scores:
            metrics["rollout/score_wait_seconds"] = controller.waited
        if (turns := controller.turns) is not None:
            metrics |= turns.metrics(self.trace.seconds * self.trace.slots)
        return metrics | controller.worker.metrics() | dict(self._synced)

    def rollout(
        self,
        groups: Sequence[Group],
        version: int,
        rule: RoundRule | None = None,
        salt: str = "",
        predict: bool = False,
        feedback: Feedback | None = None,
        same_noise: bool = False,
        watch: Callable[[Completion], None] | None = None,
    ) -> Generator[Group, None, None]:
        """Sync the weights of `version`, run `groups`, and yield each as it completes.

        The arguments are those of `RolloutController.run`; by default every group runs to its end.
        With `watch` no hook is called, but `watch` with each scored completion. Starting a rollout
        drops an earlier one that did not run to its end, but waits for one in the background.
        """
        self.wait()
        self._rollout.close()
        self.scorer.version, self._watch = version, watch
        rule = rule or FullRound(len(groups))
        drawn = self.controller.run(groups, rule, version, salt, predict, feedback, same_noise)
        self._rollout = rollout = self._run(version, drawn)
        next(rollout)  # the weights have to be read before they change
        return cast(Generator[Group, None, None], rollout)

    def _run(self, version: int, groups: Iterator[Group]) -> Generator[Group | None, None, None]:
        """Yield `None` once the weights are synced, then the groups.

        The timeline gets what engines and rewards do for the rollout, and that the trainer waits.
        """
        give_back(self.spec.device)
        self.engine.wake()
        timeline, began = self.timeline, None
        try:
            with timeline.doing(WEIGHTS, TRAINER, ENGINES):
                self._synced = self._sync(version)
            self.controller.worker.start_trace()
            began, self.scorer.waits = timeline.now(), []
            yield None
            yield from groups
        finally:
            if began is not None:
                waiting = ENGINES
                if not self.engine.virtual_clock:
                    timeline.add_trace(self.trace)
                if not self.background.running:
                    waiting = TRAINER
                    self.rollout_ended = timeline.now()
                    timeline.add(TRAINER, "rollout", began, self.rollout_ended, ENGINES)
                for start, end in self.scorer.waits:
                    timeline.add(waiting, "rewards", start, end, REWARDS)
            self.engine.sleep()

    def in_background(self, decode: Callable[[], None]) -> None:
        """Run `decode`, which runs the current rollout, in a thread until `wait`.

        Hooks that the rollout calls meanwhile are called in `wait`, and `heed` is not.
        """
        self.background.start(decode)

    def wait(self) -> None:
        """Wait for the rollout in the background, if there is one; its exception is raised here."""
        if self.background.running:
            self.background.wait(self.timeline.doing("rollout", TRAINER, waits_for=ENGINES))

    def restart(self, tensor_parallel_size: int) -> None:
        """Restart the engine with its model split over `tensor_parallel_size` devices.

        Only between rollouts; a rollout that did not run to its end is dropped. Nothing else is
        lost: the next rollout syncs the weights.

        Raises:
            UsageError: called during a rollout, such as in `on_completion_end`.
            UsageError: the engine does not start with this size, or its cache is too small for the
                slots.
        """
        running = getgeneratorstate(self._rollout) == GEN_RUNNING
        if running or self.background.running:
            raise UsageError(
                "The engine cannot restart during a rollout. Do it in `on_round_start` or "
                "`on_round_end`."
            )
        self._rollout.close()
        self.engine.close()
        self.engine.tensor_parallel_size = tensor_parallel_size
        give_back(self.spec.device)
        self.engine.start(self.spec)
        self.controller.worker = self.engine.make_worker(self._admission())

    def close(self) -> None:
        """Close the engine and the reward workers, even if one of them fails to close."""
        self.background.close()
        with ExitStack() as stack:
            stack.callback(self.scorer.close)
            if (turns := self.controller.turns) is not None:
                stack.callback(turns.close)
            stack.callback(self.engine.close)
            stack.callback(self._rollout.close)
            stack.callback(self.background.shutdown)


class Background:
    """Runs one rollout at a time in a thread, and keeps the hooks that it calls for `wait`."""

    def __init__(self, heed: Callable[[], None]) -> None:
        self._trainer_heed = heed
        self._threads = futures.ThreadPoolExecutor(1, "rollout")
        self._rollout: futures.Future[None] | None = None
        self._held: list[Callable[[], None]] | None = None
        """Hooks that the rollout has not called yet; set before its thread begins."""
        self._closing = False

    @property
    def running(self) -> bool:
        """Whether a rollout was started, and not waited for."""
        return self._held is not None

    def start(self, decode: Callable[[], None]) -> None:
        """Run `decode` until `wait`."""
        self._held = []
        self._rollout = self._threads.submit(decode)

    def wait(self, waiting: AbstractContextManager[None]) -> None:
        """Wait for the rollout in the context `waiting`, then call the hooks that were kept.

        An exception of the rollout is raised here.
        """
        rollout, held = self._rollout, self._held
        assert rollout is not None and held is not None
        try:
            with waiting:
                futures.wait([rollout])
        except BaseException:  # a second Ctrl-C
            self._closing = True
            raise
        self._rollout = self._held = None
        rollout.result()
        for hook in held:
            hook()

    def heed(self) -> None:
        """Called by the rollout before each step, wherever it runs."""
        if self._held is None:
            self._trainer_heed()
        elif self._closing:
            raise futures.CancelledError

    def kept(self, hook: Callable[[T], None]) -> Callable[[T], None]:
        """Return a hook that `wait` calls, if the rollout in the background has called it."""

        def call(of: T) -> None:
            if self._held is not None:
                self._held.append(partial(hook, of))
            else:
                hook(of)

        return call

    def close(self) -> None:
        """Let the rollout end at its next step."""
        self._closing = True

    def shutdown(self) -> None:
        """Wait until the thread has ended."""
        if self._rollout is not None:
            futures.wait([self._rollout])
        self._threads.shutdown()
