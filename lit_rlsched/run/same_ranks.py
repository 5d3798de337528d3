"""Several ranks: what they must have in common, and whom one waits for at the start."""

import os
import socket
import sys
import threading
import time
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Any

import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn

from lit_rlsched.ranks import DistributedTeam, Team
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import fingerprint
from lit_rlsched.types import Prompt


def check_same(
    all_gather: Callable[[Any], Sequence[tuple[str, Mapping[str, Any]]]],
    own: Mapping[str, Any],
    fix: str = "Start all of them with the same package and the same settings.",
) -> None:
    """Refuse processes of a Trainer that differ in what each has of its own."""
    ranks = all_gather((gethostname(), own))
    several = len({name for name, _ in ranks}) > 1
    at = [f" on {name}" if several else "" for name, _ in ranks]
    first = ranks[0][1]
    for rank, (_, settings) in enumerate(ranks):
        for name in {**first, **settings}:
            ours, theirs = (of.get(name, "not there") for of in (settings, first))
            if ours != theirs:
                raise UsageError(
                    f"Rank {rank}{at[rank]} has `{name}={ours}`, and rank 0{at[0]} has "
                    f"`{name}={theirs}`. {fix}"
                )


def check_same_weights(model: nn.Module) -> None:
    """Refuse ranks that have loaded other weights, before each keeps a part of its own."""
    own = {"weights": fingerprint(model.state_dict())}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (gethostname(), own))
    check_same(lambda _: ranks, own, "Copy the model's folder of rank 0 to every host.")


def check_same_checkpoint(team: Team, path: str | Path | None) -> None:
    """Refuse ranks that have begun with another checkpoint, or without one."""
    if team.size == 1:
        return
    name = None if path is None else Path(path).name
    if path is not None and "://" not in str(path):
        # a file that is damaged is refused when it is loaded
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as file:
            # torch keeps a checksum of each part at the end
            parts = [(part.filename, part.file_size, part.CRC) for part in file.infolist()]
            name = f"{name} ({zlib.crc32(repr(parts).encode()):08x})"
    fix = "Copy the checkpoint of rank 0 to the same path on every host."
    check_same(team.all_gather, {"ckpt_path": name}, fix)


def check_same_prompts(team: Team, sets: Mapping[str, Iterable[Prompt]]) -> None:
    """Refuse ranks that have read other data."""
    if team.size == 1:
        return
    own = {}
    for stage, prompts in sets.items():
        number = digest = 0
        for number, prompt in enumerate(prompts, start=1):  # noqa: B007
            digest = zlib.crc32(prompt.uid.encode(), digest)
            digest = zlib.crc32(array("i", prompt.token_ids).tobytes(), digest)
        own[f"{stage}_data"] = f"{number:,} prompts ({digest:08x})"
    check_same(team.all_gather, own, "Copy the data of rank 0 to every host.")


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
    opened = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    if trainer.global_rank == 0 and not opened:
        _, port = waiting.leader  # another run may have it
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"`MASTER_PORT={port}` cannot be opened on {gethostname()} ({error}). Two runs on "
                "one machine need two ports. Set another one on every machine of this run."
            ) from None
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
        strategy: Any = trainer.strategy
        environment = strategy.cluster_environment
        host, port = self.leader = environment.main_address, environment.main_port
        self._place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._trainer = trainer
        self._limit = getattr(strategy, "_timeout", None) or timedelta(minutes=30)
        self._began = self._said = time.monotonic()

    def obstacle(self) -> str | None:
        """Say why rank 0 cannot be reached; `None`: it can."""
        try:
            socket.create_connection(self.leader, timeout=5).close()
        except (socket.gaierror, UnicodeError) as error:
            return f"`MASTER_ADDR={self.leader[0]}` is not known here ({error})"
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
