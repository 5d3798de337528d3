"""The start of several ranks: whom one waits for, said in time."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from socket import gethostname
from typing import Any

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from lit_rlsched.ranks import DistributedTeam
from lit_rlsched.settings import UsageError

SLOW = 30.0
"""Seconds until a rank says whom it waits for; again and again after that."""
_RETRY = 0.5


def await_ranks(trainer: Trainer) -> None:
    """Wait until rank 0 can be reached, and watch from then on until the process group is made.

    The strategy's `timeout` is the limit, as in PyTorch, which is silent until then.
    """
    if trainer.num_nodes == 1 or dist.is_initialized():
        return
    waiting = _Waiting(trainer)
    if trainer.global_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        waiting.check_port()  # torchrun has opened it already
    while trainer.global_rank > 0 and (why := waiting.obstacle()) is not None:
        if waiting.is_due and (message := waiting.overdue(why)) is not None:
            raise UsageError(message)
        time.sleep(_RETRY)
    state = trainer.state
    waiting.watch(lambda: dist.is_initialized() or state.status != TrainerStatus.RUNNING)


def make_team(trainer: Trainer) -> DistributedTeam:
    """Form the team of a process group.

    Gloo would wait for ever for a port that a firewall closes.
    """
    over = threading.Event()
    _Waiting(trainer).watch(over.is_set)
    try:
        return DistributedTeam()
    finally:
        over.set()


class _Waiting:
    """A rank that waits for the others from when this is made."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._strategy: Any = trainer.strategy
        self._limit = getattr(self._strategy, "_timeout", None) or timedelta(minutes=30)
        self._began = self._said = time.monotonic()

    @property
    def _leader(self) -> tuple[str, int]:
        environment = self._strategy.cluster_environment
        return environment.main_address, environment.main_port

    @property
    def _place(self) -> str:
        host, port = self._leader
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def check_port(self) -> None:
        """Refuse a port of rank 0 that cannot be opened: another run may have it."""
        _, port = self._leader
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"`MASTER_PORT={port}` cannot be opened on {gethostname()} ({error}). Two runs on "
                "one machine need two ports. Set another one on every machine of this run."
            ) from None

    def obstacle(self) -> str | None:
        """Say why rank 0 cannot be reached; `None`: it can."""
        try:
            socket.create_connection(self._leader, timeout=5).close()
        except (socket.gaierror, UnicodeError) as error:
            return f"`MASTER_ADDR={self._leader[0]}` is not known here ({error})"
        except (OSError, OverflowError) as error:
            return f"nothing answers at {self._place} ({error})"
        return None

    @property
    def is_due(self) -> bool:
        """Whether it has said nothing for `SLOW` seconds."""
        return time.monotonic() >= self._said + SLOW

    def overdue(self, why: str | None) -> str | None:
        """Say why it waits, or return that once it is too long."""
        now, trainer = time.monotonic(), self._trainer
        self._said = now
        why = why or f"{self._place} answers, but some ranks are not there"
        message = (
            f"Rank {trainer.global_rank} on {gethostname()} has waited for the others for "
            f"{now - self._began:.0f} s: {why}. {trainer.world_size} processes are expected on "
            f"{trainer.num_nodes} machines, each of which needs a `NODE_RANK` of its own. "
            "`MASTER_ADDR` is the machine of rank 0 as the others see it. All ports between them "
            "must be open. On a machine with several networks, or whose own name is 127.0.1.1 to "
            "itself, set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`."
        )
        if now > self._began + self._limit.total_seconds():
            return message
        if trainer.local_rank == 0:
            print(message, file=sys.stderr, flush=True)
        return None

    def watch(self, is_over: Callable[[], bool]) -> None:
        """End this process if it waits for too long, in a thread."""

        def loop() -> None:
            while not is_over():
                message = self.overdue(self.obstacle()) if self.is_due else None
                if message is not None and not is_over():
                    print(f"error: {message}", file=sys.stderr, flush=True)
                    os._exit(1)
                time.sleep(_RETRY)

        threading.Thread(target=loop, daemon=True, name="arrival").start()
