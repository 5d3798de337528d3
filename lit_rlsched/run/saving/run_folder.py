"""Folder of a run: holds every file that the run writes, and is locked while the run lasts."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.processes import require_posix
from lit_rlsched.run.saving.checkpoints import CheckpointError, read_checkpoint
from lit_rlsched.settings import UsageError
from lit_rlsched.text import is_deep

LOCK = "run.json"
"""File that describes the process that uses the folder. The process keeps it locked."""

_held: dict[tuple[int, Path], IO[str]] = {}
_folders: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()


class FolderInUse(UsageError):
    """Another process uses the folder."""


def folder_of(trainer: Trainer) -> Path:
    """Return the folder of a run: `default_root_dir`, or a new one if that is Lightning's."""
    root = Path(trainer.default_root_dir)
    if root.absolute() != Path.cwd():
        return root
    if trainer not in _folders:
        _folders[trainer] = new_folder(root / "runs")
    return _folders[trainer]


def name_of(folder: Path) -> str:
    """Return the name of the run in a folder: that of `runs/countdown/version_3` is `countdown`."""
    path = folder.resolve()
    return path.parent.name if path.name.startswith("version_") else path.name


def full_name_of(folder: Path) -> str:
    """Return a name that tells runs apart: of `runs/countdown/version_3` `countdown/version_3`."""
    name, path = name_of(folder), folder.resolve()
    return name if name == path.name else f"{name}/{path.name}"


def new_folder(root: Path, kind: str = "version") -> Path:
    """Make and return the next of `root/version_0`, `root/version_1`, ..."""
    number = max((n for n, _ in _numbered(root, kind)), default=-1)
    while True:
        number += 1
        folder = root / f"{kind}_{number}"
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir(parents=True)
            return folder


def newest_folder(root: Path) -> Path | None:
    """Return the newest `root/version_N` with a checkpoint; the newest of all if none has one."""
    folders = [folder for _, folder in sorted(_numbered(root, "version"), reverse=True)]
    found = (folder for folder in folders if next(folder.rglob("*.ckpt"), None) is not None)
    return next(found, folders[0] if folders else None)


def _numbered(root: Path, kind: str) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(rf"{kind}_(\d+)", path.name), path) for path in root.glob(f"{kind}_*"))
    return [(int(match[1]), path) for match, path in found if match and path.is_dir()]


def folder_with(checkpoint: Path) -> Path | None:
    """Return the folder of the run that saved a checkpoint."""
    parents = (*checkpoint.absolute().parents, *checkpoint.resolve().parents)
    return next((folder for folder in parents if (folder / LOCK).is_file()), None)


def occupy(folder: Path) -> None:
    """Lock a folder until this process ends or calls `leave`. A second call does nothing."""
    require_posix("The lock of a run's folder")
    import fcntl  # does not exist on Windows

    key = os.getpid(), folder.resolve()
    if key in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        # unlike `flock`, not inherited: a child that survives this process does not hold the lock
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        user, known = "another process", "process {process} on {host} (`{command}`, since {since})"
        with suppress(ValueError, KeyError, TypeError):
            user = known.format(**json.loads(file.read()))
        raise FolderInUse(
            f"`{folder}` is in use by {user}. Wait until it ends, stop it, or leave "
            "`default_root_dir` out so that each run gets a new folder."
        ) from None
    file.truncate(0)
    about = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "command": " ".join(sys.argv),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
    json.dump(about, file)
    file.flush()
    _held[key] = file


def last_use(folder: Path) -> dict[str, Any]:
    """Return what the process that was the last one to use a folder wrote; `{}` if none did."""
    try:
        about = json.loads((folder / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def leave(folder: Path) -> None:
    """Release the lock of a folder, if this process holds it."""
    if (file := _held.pop((os.getpid(), folder.resolve()), None)) is not None:
        file.close()


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that wrote nothing, such as one with a wrong setting."""
    leave(folder)
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
            folder.parent.rmdir()


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds files of a run that a new run would mix with its own."""
    patterns = ("completions.jsonl", "**/metrics.csv", "*.ckpt", "checkpoints/*.ckpt")
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def newest_checkpoint(*folders: Path, resumable: bool = True) -> Path | None:
    """Return the newest readable checkpoint in these folders, and warn of the others.

    The order is that in which they were saved: a copy changes the times of files.
    """
    order: dict[Path, tuple[float, int, int]] = {}
    broken: dict[Path, CheckpointError] = {}
    for path in sorted({path.resolve() for folder in folders for path in folder.rglob("*.ckpt")}):
        try:
            checkpoint = read_checkpoint(path, verify=False)
        except CheckpointError as error:
            broken[path] = error
            continue
        run = run_state(checkpoint)
        if not resumable or (run and "optimizer_states" in checkpoint):
            age = run.get("unix_seconds", 0.0), run.get("num_rounds", 0)
            order[path] = *age, checkpoint["global_step"]
    found, instead = None, "The run starts from scratch instead." if resumable else ""
    for path in sorted(order, key=lambda path: (order[path], path), reverse=True):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            broken[path] = error
            continue
        found = path
        instead = f"The run resumes from `{path}`" if resumable else f"`{path}` is used"
        instead += " instead."
        break
    if broken:
        why = " ".join(f"{str(e).partition('. Use another')[0]}." for e in broken.values())
        rank_zero_warn(f"{why} {instead}".rstrip())
    return found


def run_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the data module; empty if there is none."""
    states = (state for state in checkpoint.values() if isinstance(state, dict))
    return next((state for state in states if {"settings", "num_rounds"} <= state.keys()), {})


def read_row(line: bytes) -> tuple[int, dict[str, Any]]:
    """Return the round and the columns of a line of `completions.jsonl`."""
    try:
        row = json.loads(line)
        number = int(row["round"])
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no row: {error!r}") from None
    if is_deep(row):
        raise ValueError("no row: it is nested too deeply")
    return number, row
