"""A started engine and its scorer: rollouts under the current weights."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, TypeVar

from lit_rlsched.data.messages import ControlTokens
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.devices import give_back
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.background import Background
from lit_rlsched.rollout.controller import RolloutController, Verify
from lit_rlsched.rollout.next_drafts import DraftingWorker, Following
from lit_rlsched.rollout.scoring import SCORE_SECONDS, Feedback, Scorer
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.in_flight_updates import InFlight
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.timeline import ENGINES, REWARDS, TRAINER, WEIGHTS, Timeline
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Sample

T = TypeVar("T")
Sync = Callable[..., Mapping[str, float]]
"""Copies the weights of a policy version to the engine and returns metrics. `keep=True`: running
requests keep their key-value cache."""


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
        in_flight: When `update` changes the weights of a rollout in the background.
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
        in_flight: InFlight | None = None,
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
        self.background = background = Background(in_flight, heed)
        """Runs rollouts beside the trainer."""
        self._watch: Callable[[Completion], None] | None = None
        self._began = 0
        """Policy version that the rollout began with."""
        try:
            give_back(spec.device)
            engine.start(spec)
            worker = engine.make_worker(self._admission())
            self.controller = RolloutController(
                worker,
                scorer,
                on_completion=background.kept(self._watched(on_completion)),
                on_group=background.kept(self._unwatched(on_group)),
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
        metrics: dict[str, float] = {}
        if self.controller.waits_for_scores:
            metrics["rollout/score_wait_seconds"] = self.controller.waited
        if (met := self.background.meetings) is not None:
            metrics["in_flight/engine_wait_seconds"] = met.rollout_seconds
            metrics["in_flight/trainer_wait_seconds"] = met.trainer_seconds
            metrics["in_flight/updates"] = len(met.switches)
        if (turns := self.controller.turns) is not None:
            metrics |= turns.metrics(self.trace.seconds * self.trace.slots)
        return metrics | self.controller.worker.metrics() | dict(self._synced)

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
        following: Following | None = None,
        verify: Verify | None = None,
    ) -> Generator[Group, None, None]:
        """Sync the weights of `version`, run `groups`, and yield each as it completes.

        The arguments are those of `RolloutController.run`; by default every group runs to its end.
        With `watch` no hook is called, but `watch` with each scored completion. Starting a rollout
        drops an earlier one that did not run to its end, but waits for one in the background.

        `following`: groups of the next round that use free slots. They are neither scored nor
        yielded. At the end of the round they stop, or `go_on` finishes them.
        """
        self.wait()
        self._rollout.close()
        self.scorer.version, self._began, self._watch = version, version, watch
        self.scorer.kept_ahead = 0
        rule, controller = rule or FullRound(len(groups)), self.controller
        if following is not None and not following.goes_on and self._moves(groups):
            following = None
        drawn = controller.run(groups, rule, version, salt, predict, feedback, same_noise, verify)
        self._rollout = self._run(version, drawn, following)
        next(self._rollout)  # the weights have to be read before they change
        return _first_part(self._rollout)

    def _moves(self, groups: Sequence[Group]) -> bool:
        """Whether completions may wait for a slot of another engine, which drafts would take."""
        unfinished = sum(not c.finished for group in groups for c in group.completions)
        worker = self.controller.worker
        return len(self.engine.engines) > 1 and worker.may_wait(unfinished)

    def go_on(self) -> None:
        """Draw the rest of the drafts of the current rollout."""
        for _ in self._rollout:
            pass

    def score_drafts(self, groups: Sequence[Group]) -> None:
        """Wait for the scores of ended drafts, given as completions."""
        samples = [Sample(group, c) for group in groups for c in group.completions]
        self.scorer.score_drafts(samples, self.background.heed)

    def score_on(self) -> None:
        """Score the drafts, in the background, until the trainer waits or all have their scores."""
        while self.scorer.scores_ahead and not self.background.wanted.is_set():
            self.background.heed()
            self.scorer.turn(SCORE_SECONDS)

    def _run(
        self, version: int, groups: Iterator[Group], following: Following | None = None
    ) -> Generator[Group | None, None, None]:
        """Yield `None` once the weights are synced and once only drafts remain."""
        controller, worker = self.controller, self.controller.worker
        give_back(self.spec.device)
        self.engine.wake()
        try:
            with self.timeline.doing(WEIGHTS, TRAINER, ENGINES):
                self._synced = self._sync(version)
            if following is not None:
                drafts = following.requests(controller.seed, version)
                controller.worker = DraftingWorker(worker, drafts)
            controller.worker.start_trace()
            with self._on_timeline():
                yield None
                yield from groups
            if following is None or not isinstance(controller.worker, DraftingWorker):
                return
            if not following.goes_on:
                controller.worker.cut()
            else:
                controller.worker.end_round()
                yield None
                with self._on_timeline():
                    controller.worker.go_on(self.background.heed, self.scorer)
        finally:
            if following is not None:
                controller.worker = worker
                worker.abort()
            self.engine.sleep()

    @contextmanager
    def _on_timeline(self) -> Iterator[None]:
        """Record when engines and rewards work for the rollout, and that the trainer waits."""
        timeline, waiting = self.timeline, ENGINES
        began, self.scorer.waits = timeline.now(), []
        try:
            yield
        finally:
            if not self.engine.virtual_clock:
                timeline.add_trace(self.trace)
            if not self.background.running:
                waiting = TRAINER
                self.rollout_ended = timeline.now()
                timeline.add(TRAINER, "rollout", began, self.rollout_ended, ENGINES)
            for start, end in self.scorer.waits:
                timeline.add(waiting, "rewards", start, end, REWARDS)

    def in_background(self, decode: Callable[[], None]) -> None:
        """Run `decode`, which runs the current rollout, in a thread until `wait`.

        Hooks that the rollout calls meanwhile are called in `wait`, and `heed` is not.
        """
        self.engine.policy_changes()
        self.background.start(decode, self.controller, self._began)

    def update(self, version: int) -> bool:
        """Give a rollout in the background the weights of a new version where they meet.

        Returns:
            Whether they met: not if the rollout is over.
        """
        worker, doing = self.controller.worker, self.timeline.doing
        if not self.background.running:
            return False
        with doing("meeting", TRAINER, waits_for=ENGINES), self.background.meeting() as how:
            if how is None:
                return False
            keep = how.cache == "keep"
            worker.suspend(keep)
            with doing(WEIGHTS, TRAINER, ENGINES):
                self._synced = self._sync(version, keep=keep)
            worker.resume(version)
            self.trace.updates.append((self._began, self.trace.decode_steps, version))
            self.engine.policy_changes()
        return True

    def wait(self) -> None:
        """Wait for the rollout in the background, if there is one; its exception is raised here."""
        if self.background.running:
            self.background.wait(self.timeline.doing("rollout", TRAINER, waits_for=ENGINES))

    def _watched(self, hook: Callable[[Completion], None]) -> Callable[[Completion], None]:
        return lambda completion: (self._watch or hook)(completion)

    def _unwatched(self, hook: Callable[[Group], None]) -> Callable[[Group], None]:
        return lambda group: hook(group) if self._watch is None else None

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


def _first_part(rollout: Generator[T | None, None, None]) -> Generator[T, None, None]:
    """Yield what comes before `None`; the rest of `rollout` stays."""
    try:
        yield from iter(partial(next, rollout, None), None)
    except GeneratorExit:
        rollout.close()
        raise
