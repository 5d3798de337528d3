"""The trainer's side of an engine's process: the pipe to it, and its end."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle

from lit_rlsched.engines._watch import Watch
from lit_rlsched.engines.base import EngineBroken, EngineDied, RolloutEngine
from lit_rlsched.processes import ChildProcess, how_it_ended
from lit_rlsched.scheduling.hangs import AnswerTimeouts
from lit_rlsched.scheduling.trace import Step

TIMED = ("start", "sync_weights", "sleep", "wake")
"""What may be asked and takes a time of its own; everything else waits for a step at most."""
SHUTDOWN = 10.0
"""Seconds it may take to close the engine before it is killed."""


class Child:
    """An engine in another process: asked over a pipe, killed where it hangs."""

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
            ["-m", "lit_rlsched.engines._engine_server"], {**os.environ, "PYTHONPATH": path}
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
