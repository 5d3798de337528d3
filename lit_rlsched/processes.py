"""Child processes that end with their parent.

Only the standard library is imported: reward workers start without anything else.
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

    It runs in its own session: Ctrl-C reaches only the parent, and killing the process group also
    ends the processes that the child started. `multiprocessing` is not used, as it would run an
    unguarded script of the user again in each child.

    Args:
        arguments: Command-line arguments of Python. Three numbers are appended: the descriptors of
            the connection and of the lifeline, and the parent's process id. The child passes the
            last two to `die_with`.
        environment: All environment variables of the child.
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
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._lifeline < 0

    def kill_group(self) -> None:
        """Kill the process group of the child, which must not have been waited for."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe and the lifeline."""
        self.connection.close()
        os.close(self._lifeline)
        self._lifeline = -1


def die_with(parent: int, lifeline: int) -> None:
    """Kill this process and its process group when the parent dies, even inside C code.

    Args:
        parent: Process id of the parent.
        lifeline: Read end of a pipe whose write end the parent holds and never writes to.
    """
    import fcntl  # missing on Windows, where no child process is started

    if hasattr(fcntl, "F_SETSIG"):
        # Linux: the kernel kills when the pipe is closed, even while C code (`re`) holds the GIL
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
    """Put an exit code into words."""
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"died of {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"
