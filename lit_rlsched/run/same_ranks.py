"""What the processes of a run must have in common, on one host or several."""

import secrets
import time
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import torch.distributed as dist
from lightning import Trainer
from torch import nn

from lit_rlsched.ranks import Team
from lit_rlsched.run.run_config import shared_config
from lit_rlsched.settings import UsageError
from lit_rlsched.training.policy import fingerprint
from lit_rlsched.training.run_settings import RunSettings
from lit_rlsched.types import Prompt

SEEN = 10.0
"""Seconds until a file of another host is seen: network file systems remember that it was not."""


def check_ranks(trainer: Trainer, team: Team, settings: RunSettings) -> None:
    """Refuse processes that were started in other ways, or whose checkpoints would not be whole."""
    check_same(team.all_gather((gethostname(), shared_config(trainer, settings))))
    check_shared_folder(trainer, team)


def check_same(
    ranks: Sequence[tuple[str, Mapping[str, Any]]],
    fix: str = "Start all of them with the same package and the same settings.",
) -> None:
    """Refuse processes of a Trainer that differ."""
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
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (gethostname(), {"weights": fingerprint(model.state_dict())}))
    check_same(found, "Copy the model's folder of rank 0 to every host.")


def checkpoint_digest(path: str | Path | None) -> str | None:
    """Return the name of a checkpoint, and digits that depend on its contents if it is a file."""
    if path is None:
        return None
    name = Path(path).name
    if "://" in str(path) or Path(path).is_dir():
        return name
    try:
        with zipfile.ZipFile(path) as file:  # torch keeps a checksum of each part at the end
            parts = [(part.filename, part.file_size, part.CRC) for part in file.infolist()]
    except (OSError, zipfile.BadZipFile):  # which is said when it is loaded
        return name
    return f"{name} ({zlib.crc32(repr(parts).encode()):08x})"


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the number of prompts, and digits that depend on their names and tokens."""
    number = digest = 0
    for number, prompt in enumerate(prompts, start=1):  # noqa: B007
        digest = zlib.crc32(prompt.uid.encode(), digest)
        digest = zlib.crc32(array("i", prompt.token_ids).tobytes(), digest)
    return f"{number:,} prompts ({digest:08x})"


def check_same_checkpoint(team: Team, path: str | Path | None) -> None:
    """Refuse ranks that have begun with another checkpoint, or without one."""
    if team.size > 1:
        own = {"ckpt_path": checkpoint_digest(path)}
        fix = "Copy the checkpoint of rank 0 to the same path on every host."
        check_same(team.all_gather((gethostname(), own)), fix)


def check_same_prompts(team: Team, sets: Mapping[str, Iterable[Prompt]]) -> None:
    """Refuse ranks that have read other data."""
    if team.size > 1:
        own = {f"{stage}_data": prompts_digest(prompts) for stage, prompts in sets.items()}
        check_same(team.all_gather((gethostname(), own)), "Copy the data of rank 0 to every host.")


def check_shared_folder(trainer: Trainer, team: Team) -> None:
    """Refuse ranks that would write the parts of a checkpoint to different disks."""
    if not getattr(trainer.strategy, "_save_distributed_checkpoint", False):
        return
    root = Path(trainer.default_root_dir).absolute()
    mark: Path = team.broadcast(root / f".shared-{secrets.token_hex(8)}")
    if team.leads:
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    team.all_gather(None)  # the file is there
    deadline = time.monotonic() + SEEN
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = team.all_gather((gethostname(), seen))
    if team.leads:
        mark.unlink()
    blind = [f"rank {rank} on {name}" for rank, (name, sees) in enumerate(found) if not sees]
    if blind:
        raise UsageError(
            f"`FSDP2Strategy(save_distributed_checkpoint=True)`: each rank writes its part of a "
            f"checkpoint below `{root}`, but {', '.join(blind)} does not see the folder of rank 0 "
            f"on {found[0][0]}: no checkpoint would be whole. Put `trainer.default_root_dir` into "
            "a folder that all hosts share, or leave `save_distributed_checkpoint` out."
        )
