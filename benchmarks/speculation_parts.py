"""CPU seconds of a vLLM engine by part of a step, for `benchmarks.speculation`."""

import time
from collections import defaultdict
from typing import Any

from lit_rlsched.engines.vllm import VLLMEngine

FORWARD, DRAWS, DRAFTS = "forward passes", "logits and draws", "draft tokens"
REST, ALL = "scheduler, inputs, outputs", "all of the engine"


class StepParts:
    """Times the parts of an engine's steps, by wrapping the functions that compute them.

    A part's seconds do not include those of other parts that it calls.

    Args:
        engine: A started engine, whose model is in this process.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = self.prefills = self.positions = 0
        self._inner: list[float] = []
        core = engine._engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._time(runner, "_model_forward", FORWARD)
        self._time(runner.model, "compute_logits", DRAWS)
        self._time(runner, "_sample", DRAWS)
        for name in ("propose", "begin", "take", "leave") if engine._drafts is not None else ():
            self._time(engine._drafts, name, DRAFTS)
        self._count(core.scheduler)
        self._time(engine, "step", REST)

    def clear(self) -> None:
        """Forget what was measured."""
        self.seconds.clear()
        self.steps = self.prefills = self.positions = 0

    def table(self) -> dict[str, float]:
        """Return seconds by part, and numbers of steps and positions."""
        counts: dict[str, float] = {"steps": self.steps, "steps with prefill": self.prefills}
        parts = {part: self.seconds[part] for part in (FORWARD, DRAWS, DRAFTS, REST)}
        return counts | {"positions": self.positions} | parts | {ALL: sum(parts.values())}

    def _time(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return function(*arguments, **more)
            finally:
                took = time.process_time() - began
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        setattr(owner, name, timed)

    def _count(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def counted(*arguments: Any, **more: Any) -> Any:
            scheduled = schedule(*arguments, **more)
            self.steps += 1
            self.prefills += bool(scheduled.scheduled_new_reqs)
            self.positions += scheduled.total_num_scheduled_tokens
            return scheduled

        scheduler.schedule = counted
