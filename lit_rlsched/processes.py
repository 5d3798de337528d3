"""Child processes that end with their parent: started, killed and accounted for in one place.

Standard library only: reward workers are started with nothing else.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe


class ChildProcess:
    """A Python process with a pipe to it, which dies when its parent does.

    It runs in a session of its own, so that Ctrl-C stays with the parent and killing its process
    group also ends what it has started. It is not made by `multiprocessing`, which would run an
    unguarded script of the user's once more in each child.

    Args:
        arguments: What Python is started with. The numbers of the connection and of the lifeline,
            and the parent's process id, are added: `main` of the child passes the last two to
            `die_with`.
        environment: All of its environment variables.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.connection, theirs = Pipe()
        read, self._lifeline = os.pipe()
        descriptors = [theirs.fileno(), read]
        numbers = map(str, [*descriptors, os.getpid()])
        self.process = subprocess.Popen(
            [sys.executable, *arguments, *numbers],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        os.close(read)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._lifeline < 0

    def kill_group(self) -> None:
        """Kill it and its process group; it must not have been waited for."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe to it and its lifeline."""
        self.connection.close()
        os.close(self._lifeline)
        self._lifeline = -1


def die_with(parent: int, lifeline: int) -> None:
    """Kill this process and all it started when the parent dies, whatever it is doing then.

    Args:
        parent: Process id of the parent.
        lifeline: Read end of a pipe whose write end the parent holds and never writes to.
    """
    import fcntl  # Windows has none, where nothing of this is started

    if hasattr(fcntl, "F_SETSIG"):
        # Linux: the kernel kills when the pipe hangs up, even where C code (`re`) holds the GIL
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | fcntl.FASYNC)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def how_it_ended(code: int | None) -> str:
    """What an exit code says, in words."""
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"died of {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"
