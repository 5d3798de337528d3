"""Any engine in a process of its own."""

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import cloudpickle
import torch

from lit_rlsched.engines._watch import Watch
from lit_rlsched.engines.base import (
    EngineBroken,
    EngineDied,
    EngineSpec,
    EngineStats,
    Partial,
    RolloutEngine,
)
from lit_rlsched.engines.device_memory import give_back
from lit_rlsched.engines.footprint import Footprint, Sizes
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.engines.shared_weights import SharedWeights, WeightsFile
from lit_rlsched.platforms import require_posix
from lit_rlsched.processes import ChildProcess, how_it_ended
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.hangs import AnswerTimeouts
from lit_rlsched.scheduling.trace import Step
from lit_rlsched.types import Event, Request

MAX_DEATHS = 3
"""Times in a row that the process may die before the run is stopped."""
TIMED = ("start", "sync_weights", "sleep", "wake")
"""What may be asked and takes a time of its own; everything else waits for a step at most."""
SHUTDOWN = 10.0
"""Seconds it may take to close the engine before it is killed."""


class ProcessEngine(RolloutEngine):
    """Runs another engine in a child process, so that it decodes while the trainer computes.

    There, the engine refills its slots and goes on by itself as long as nothing that the trainer
    decides between two steps could change what is drawn; `StreamedTraining` needs that. Weights are
    handed over through memory that both processes share, a second copy of them on the host.

    A process that dies, by the kernel's hand or its own, or loses a worker process of vLLM, is
    started anew under the same weights, and what it was decoding goes on from the tokens that the
    trainer has received: from there on it is drawn with other noise, unless the noise of the engine
    has no state (`TransformersEngine`). One that hangs is killed and replaced in the same way: it
    may take 20 times as long for a step as 99 % of the run's steps have taken, and 120 s at least;
    10 minutes for the first, 30 for its start (`AnswerTimeouts`). `rollout/engine_restarts` counts
    it. One that dies three times without a step in between stops the run.

    Args:
        engine: The engine; `VLLMEngine()` by default.

    Raises:
        RuntimeError: in `start`, what the engine raised there.

    Example::

        RolloutDataModule(..., engine=ProcessEngine(VLLMEngine(gpu_memory_utilization=0.5)))
    """

    decodes_by_itself = True

    def __init__(self, engine: RolloutEngine | None = None) -> None:
        if engine is None:
            from lit_rlsched.engines.vllm import VLLMEngine

            engine = VLLMEngine()
        if isinstance(engine, ProcessEngine):
            raise ValueError("`ProcessEngine(engine=ProcessEngine(...))`: one process is enough.")
        self.engine = engine
        self.restarts = 0
        """Times the process died and was started anew."""
        self.logprobs = engine.logprobs
        self.kv_block, self.kv_capacity = engine.kv_block, engine.kv_capacity
        self._child: Child | None = None
        self._spec: EngineSpec | None = None
        self._file: WeightsFile | None = None
        self._weights: tuple[SharedWeights, int] | None = None
        """That were synced last, and their policy version."""
        self._deaths = 0
        self._timeouts = AnswerTimeouts()

    @property
    def pid(self) -> int | None:
        """Of the child, where it runs."""
        return None if self._child is None else self._child.process.pid

    @property
    def tensor_parallel_size(self) -> int:
        """The engine's."""
        return self.engine.tensor_parallel_size

    @tensor_parallel_size.setter
    def tensor_parallel_size(self, size: int) -> None:
        self.engine.tensor_parallel_size = size

    def most_slots(self, spec: EngineSpec) -> int:
        """The engine's."""
        return self.engine.most_slots(spec)

    def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
        """The engine's."""
        return self.engine.max_tensor_parallel_size(spec)

    def cache_dtype(self, spec: EngineSpec) -> torch.dtype:
        """The engine's."""
        return self.engine.cache_dtype(spec)

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """The engine's, and weights on their way to it."""
        apart = self.engine.footprint(spec, replace(sizes, apart=True))
        dtype = self.cache_dtype(replace(spec, policy=None))
        return replace(apart, handed_over=sizes.parameters * dtype.itemsize)

    def cache_tokens(self, spec: EngineSpec, footprint: Footprint, token_bytes: int) -> int | None:
        """The engine's."""
        return self.engine.cache_tokens(spec, footprint, token_bytes)

    def start(self, spec: EngineSpec) -> None:
        """Start the process, and the engine in it."""
        require_posix("`ProcessEngine`")
        self.close()
        self._spec = replace(spec, policy=None)  # it loads weights of its own
        self._file = WeightsFile()
        self._deaths = 0
        try:
            try:
                self._launch()
            except EngineDied:
                self.revive()
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        assert self._spec is not None
        give_back(self._spec.device)  # where it is replaced, the trainer has computed meanwhile
        self._timeouts.starts()
        self._child = Child(self.engine, self._timeouts)
        self.kv_block, self.kv_capacity = self._child.call("start", self._spec)
        if self._weights is not None:
            self._child.call("engine", "sync_weights", *self._weights)

    def submit(self, requests: Sequence[Request]) -> None:
        self._ask("engine", "submit", requests)

    def step(self) -> list[Event]:
        events: list[Event] = self._ask("engine", "step")
        self._deaths = 0
        return events

    def abort(self, request_ids: Iterable[str]) -> dict[str, Partial]:
        try:
            aborted: dict[str, Partial] = self._ask("engine", "abort", list(request_ids))
        except EngineDied:
            return {}
        return aborted

    def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._refuse_when_closed()
        assert self._file is not None
        assert self._spec is not None
        dtype = self.engine.cache_dtype(self._spec)
        self._weights = self._file.write(named_tensors, dtype), version
        self._insist("engine", "sync_weights", *self._weights)

    def stats(self) -> EngineStats:
        stats: EngineStats = self._insist("engine", "stats")
        return stats

    def now(self) -> float:
        return float(self._insist("engine", "now"))

    def sleep(self) -> None:
        if self.alive:  # else it was given up
            self._insist("engine", "sleep")

    def wake(self) -> None:
        self._insist("engine", "wake")

    def close(self) -> None:
        """End the process; it is killed if it does not end by itself."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
        file, self._file, self._weights = self._file, None, None
        if file is not None:
            file.close()

    def make_worker(self, admission: Admission) -> RemoteWorker:
        """The worker is in the engine's process; this stands for it here."""
        return RemoteWorker(self, admission)

    @property
    def alive(self) -> bool:
        """Whether there is a process: it was started, not closed and not given up."""
        return self._child is not None

    @property
    def child(self) -> "Child":
        """The process that runs."""
        self._refuse_when_closed()
        assert self._child is not None
        return self._child

    def revive(self) -> None:
        """Start the process anew, under the weights it had.

        Raises:
            RuntimeError: it died too often.
        """
        error: Exception | None = None
        while True:
            how = self.child.kill()
            if error is not None:
                how = f"did not start again ({error})"
            self._deaths += 1
            if self._deaths >= MAX_DEATHS:
                self.close()
                raise RuntimeError(
                    f"The engine's process {how}, {self._deaths} times in a row. If it was killed "
                    "from outside, memory may have run out: give the key-value cache less."
                ) from error
            self.restarts += 1
            warnings.warn(
                f"The engine's process {how}; another one takes its place and goes on from the "
                f"tokens received (restart {self.restarts}).",
                stacklevel=2,
            )
            try:
                return self._launch()
            except EngineDied:
                error = None
            except Exception as refusal:  # it has started like this before
                error = refusal

    def went_on(self) -> None:
        """It has made a step since it was started."""
        self._deaths = 0

    def _ask(self, *message: Any) -> Any:
        """The answer of the child; where it dies, another one is started, which knows nothing."""
        try:
            return self.child.call(*message)
        except EngineDied:
            self.revive()
            raise

    def _insist(self, *message: Any) -> Any:
        """The same of what can be asked of another one."""
        while True:
            with suppress(EngineDied):
                answer = self._ask(*message)
                self._deaths = 0
                return answer

    def _refuse_when_closed(self) -> None:
        if self._child is None:
            raise RuntimeError("The engine is closed or was not started.")


class Child:
    """The process and the pipe to it."""

    def __init__(self, engine: RolloutEngine, timeouts: AnswerTimeouts) -> None:
        try:
            pickled = cloudpickle.dumps(engine)
        except Exception as error:
            raise TypeError(
                f"`{type(engine).__name__}` cannot be sent to a process of its own: {error}. Let "
                "it open what cannot be pickled in `start`."
            ) from error
        self._asked = 0
        self._kind = ""
        """Of the message that was asked last."""
        self._timeouts = timeouts
        self.prefill: Callable[[], int] = lambda: 0
        """Most tokens that the next step may have to prefill."""
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._child = ChildProcess(
            ["-m", "lit_rlsched.engines._child"], {**os.environ, "PYTHONPATH": path}
        )
        self.connection, self.process = self._child.connection, self._child.process
        self._watch = Watch(self._kill_hanging)
        self.tell(pickled)

    def call(self, *message: Any, skipped: Callable[[Any], object] = lambda value: None) -> Any:
        """Send a message and return its answer.

        Args:
            *message: What is asked.
            skipped: Called with answers to what was asked before, which nobody waits for any more.

        Raises:
            EngineDied: there is nobody any more.
            Exception: what was raised there, or by what was told before.
        """
        self.ask(*message)
        return self.answer(skipped)

    def ask(self, *message: Any) -> None:
        """Send a message that has answers."""
        self._asked += 1
        self._kind = message[1] if message[0] == "engine" else message[0]
        self._send(self._asked, *message)

    def answer(self, skipped: Callable[[Any], object] = lambda value: None) -> Any:
        """The next answer to what was asked last; see `call`."""
        while True:
            number, raised, value, seconds = self._receive()
            if raised and number in (0, self._asked):
                error = unpickled(value)
                if isinstance(error, EngineBroken):
                    self._fault = f"lost a part of its engine ({error})"
                    raise EngineDied(self.kill()) from error
                raise error
            self._observe(value, seconds, number == self._asked)
            if number == self._asked:
                return value
            skipped(value)

    def tell(self, *message: Any) -> None:
        """Send what has no answer."""
        self._send(0, *message)

    def _send(self, *message: Any) -> None:
        try:
            with self._watch.waiting(self._limit):
                self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise EngineDied(self.kill()) from None

    def _receive(self) -> tuple[int, bool, Any, float]:
        """The number of the message that is answered, whether it raised, the answer, its time."""
        try:
            with self._watch.waiting(self._limit):
                answer: tuple[int, bool, Any, float] = pickle.loads(self.connection.recv_bytes())
        except (OSError, EOFError):
            raise EngineDied(self.kill()) from None
        return answer

    def _observe(self, value: Any, seconds: float, asked: bool) -> None:
        if isinstance(value, Step):
            kind = "prefill" if value.prefill_tokens else "decode"
            self._timeouts.observe(kind, seconds, value.prefill_tokens)
        elif asked and self._kind in TIMED:
            self._timeouts.observe(self._kind, seconds)

    def _limit(self) -> float:
        if self._kind in TIMED:
            return self._timeouts.limit(self._kind)
        return self._timeouts.limit("decode", "prefill", size=self.prefill())

    def _kill_hanging(self, seconds: float) -> None:
        self._fault = f"did not answer for {seconds:.0f} s and was killed"
        self._child.kill_group()

    def kill(self) -> str:
        """Kill the process and all it started; says what it had died of if it was dead."""
        if self._child.closed:
            return self._end
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)  # its own exit code, where it is about to exit
        self._watch.end()
        self._child.kill_group()
        self.process.wait()
        self._child.close()
        self._end = self._fault or how_it_ended(self.process.returncode)
        return self._end

    def close(self) -> None:
        """Let the engine close, then end the process."""
        try:
            if not self._child.closed:
                with suppress(EngineDied, subprocess.TimeoutExpired):
                    self.tell("close")
                    self.process.wait(timeout=SHUTDOWN)
        finally:
            self.kill()

    _end = _fault = ""


def unpickled(error: tuple[bytes, str, bool]) -> BaseException:
    """An exception of the child, with the place it comes from and whether it is a refusal."""
    pickled, text, refusal = error
    try:
        raised: BaseException = pickle.loads(pickled)
    except Exception:
        last_line = text.rstrip().rpartition("\n")[2]
        raised = RuntimeError(f"The engine's process raised what cannot be sent: {last_line}")
    raised.add_note(f"In the engine's process:\n{text}")
    raised.refusal = refusal  # type: ignore[attr-defined]  # for `is_refusal`
    return raised
