"""The start of ranks on several hosts: whom one waits for, said in time."""

import os
import socket
import sys
import threading
import time
from socket import gethostname
from typing import Any

from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from lit_rlsched.settings import UsageError

SLOW = 30.0
"""Seconds until a rank says whom it waits for; again and again after that."""
LIMIT = 600.0
"""Seconds until a rank ends that waits."""
_RETRY = 0.5
_FIX = (
    "Start a process for each rank, let `MASTER_ADDR` and `MASTER_PORT` name rank 0's host and a "
    "free port as the other hosts see them, and let these hosts connect to each other on all ports."
)


def await_ranks(trainer: Trainer) -> None:
    """Wait until rank 0 can be reached, and watch from then on until the ranks are a team.

    PyTorch gives up after half an hour, and Gloo never does if a firewall closes one of its ports.

    Raises:
        UsageError: rank 0 cannot be reached in `LIMIT` seconds.
    """
    if trainer.num_nodes == 1:
        return
    waiting = _Waiting(trainer)
    while trainer.global_rank > 0 and waiting.obstacle() is not None:
        if (message := waiting.overdue()) is not None:
            raise UsageError(message)
        time.sleep(_RETRY)
    threading.Thread(target=waiting.watch, daemon=True, name="arrival").start()


class _Waiting:
    """A rank that waits for the others from when this is made."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        environment: Any = trainer._accelerator_connector.cluster_environment
        self._leader = (environment.main_address, environment.main_port)
        self._began = self._said = time.monotonic()

    def obstacle(self) -> str | None:
        """Say why rank 0 cannot be reached; `None`: it can."""
        host, port = self._leader
        try:
            socket.create_connection(self._leader, timeout=5).close()
        except socket.gaierror:
            return f"`MASTER_ADDR={host}` is not the name of a host here"
        except OSError as error:
            return f"nothing answers at {host}:{port} ({error.strerror or error})"
        return None

    def overdue(self) -> str | None:
        """Say every `SLOW` seconds how long it has been; return the message once it is too long."""
        now = time.monotonic()
        if now < self._said + SLOW:
            return None
        self._said = now
        host, port = self._leader
        why = self.obstacle() or f"{host}:{port} answers, but some ranks are not there"
        name = f"Rank {self._trainer.global_rank} on {gethostname()}"
        message = f"{name} has waited for the others for {now - self._began:.0f} s: {why}. {_FIX}"
        if now > self._began + LIMIT:
            return message
        print(message, file=sys.stderr, flush=True)
        return None

    def watch(self) -> None:
        """End this process if it waits for too long."""
        run, state = self._trainer.datamodule.run, self._trainer.state
        while state.status == TrainerStatus.RUNNING and run.team.size == 1:
            if (message := self.overdue()) is not None:
                print(f"error: {message}", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(_RETRY)
