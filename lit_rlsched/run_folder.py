"""The folder of a run: one of its own, locked while it is in use, with all that the run leaves."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.checkpoints import CheckpointError, read_checkpoint
from lit_rlsched.platforms import require_posix

LOCK = "run.json"
"""Says who uses the folder, and is locked as long as that process lives."""

_held: dict[tuple[int, Path], IO[str]] = {}
_folders: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()


class FolderInUse(RuntimeError):
    """Another process runs there."""


def folder_of(trainer: Trainer) -> Path:
    """Where everything of a Trainer's run goes: its `default_root_dir`.

    Where none was given, and it is the working directory, a new folder `runs/version_N`.
    """
    root = Path(trainer.default_root_dir)
    if root.absolute() != Path.cwd():
        return root
    if trainer not in _folders:
        _folders[trainer] = new_folder(root / "runs")
    return _folders[trainer]


def new_folder(root: Path, kind: str = "version") -> Path:
    """Make the next of `root/version_0`, `root/version_1`, ..., and give it."""
    number = max((n for n, _ in _versions(root, kind)), default=-1)
    while True:
        number += 1
        folder = root / f"{kind}_{number}"
        with suppress(FileExistsError):  # another run was faster
            folder.mkdir(parents=True)
            return folder


def newest_folder(root: Path) -> Path | None:
    """The last that `new_folder` has made."""
    return max(_versions(root, "version"), default=(0, None))[1]


def folder_with(checkpoint: Path) -> Path | None:
    """The folder of the run that has saved a checkpoint."""
    return next((p for p in checkpoint.absolute().parents if (p / LOCK).is_file()), None)


def occupy(folder: Path) -> None:
    """Lock a folder until this process ends, or calls `leave`; the second time does nothing.

    Raises:
        FolderInUse: another process has it; names both.
        RuntimeError: on Windows.
    """
    require_posix("The lock of a run's folder")
    import fcntl  # Windows has none

    key = os.getpid(), folder.resolve()
    if key in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        # of the process, so that no child of one that was killed keeps it
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        raise FolderInUse(
            f"`{folder}` is in use by {_who(file.read())}. Wait for it to end, stop it, or leave "
            "`default_root_dir` out: each run then gets a folder of its own."
        ) from None
    file.truncate(0)
    json.dump(_about_this_process(), file)
    file.flush()
    _held[key] = file


def leave(folder: Path) -> None:
    """Let others use the folder."""
    if (file := _held.pop((os.getpid(), folder.resolve()), None)) is not None:
        file.close()


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it has written anything."""
    leave(folder)
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK}:
        with suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
            folder.parent.rmdir()


def holds_run(folder: Path) -> bool:
    """Whether a run has left something there that another one would mix with."""
    things = ("completions.jsonl", "**/metrics.csv", "*.ckpt", "checkpoints/*.ckpt")
    return any(next(folder.glob(pattern), None) is not None for pattern in things)


def newest_checkpoint(*folders: Path) -> Path | None:
    """The newest checkpoint in these folders that a run can go on from.

    Newer ones that cannot be read are named in a warning, with the rounds that are lost with them.
    """
    files = {path.resolve() for folder in folders for path in folder.rglob("*.ckpt")}
    broken: list[tuple[Path, CheckpointError]] = []
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            broken.append((path, error))
            continue
        rounds = _rounds_over(checkpoint)
        if rounds is not None:
            _warn(broken, path, rounds, _last_round(folders, [p for p, _ in broken]))
            return path
    _warn(broken, None, 0, _last_round(folders, [p for p, _ in broken]))
    return None


def _warn(
    broken: list[tuple[Path, CheckpointError]], path: Path | None, rounds: int, last: int | None
) -> None:
    if not broken:
        return
    why = " ".join(str(error).partition(". Use another")[0] + "." for _, error in broken)
    lost = "what came after it is" if last is None else f"rounds {rounds} to {last} are"
    if last is not None and last < rounds:
        lost = "no round is"
    begun = "the run begins anew" if path is None else f"the run goes on from `{path}`"
    rank_zero_warn(f"{why} Instead, {begun}: {lost} discarded, to be drawn again.")


def _rounds_over(checkpoint: dict[str, Any]) -> int | None:
    """How many rounds a run that goes on from there has behind it; None: it cannot."""
    if "optimizer_states" not in checkpoint:
        return None
    for state in checkpoint.values():
        if isinstance(state, dict) and {"settings", "num_rounds"} <= state.keys():
            return int(state["num_rounds"])
    return None


def _last_round(folders: Iterable[Path], broken: Iterable[Path]) -> int | None:
    """The last round of a run, as far as names of checkpoints and written completions tell."""
    numbers = [int(m[1]) - 1 for path in broken if (m := re.match(r"round_(\d+)", path.name))]
    for folder in folders:
        with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            with (folder / "completions.jsonl").open("rb") as file:
                lines = [line for line in file if line.endswith(b"\n")]
            numbers.append(int(json.loads(lines[-1])["round"]))
    return max(numbers, default=None)


def _versions(root: Path, kind: str) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(rf"{kind}_(\d+)", path.name), path) for path in root.glob(f"{kind}_*"))
    return [(int(match[1]), path) for match, path in found if match and path.is_dir()]


def _about_this_process() -> dict[str, str | int | None]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "command": " ".join(sys.argv),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def _who(text: str) -> str:
    try:
        about = json.loads(text)
        return (
            f"process {about['process']} on {about['host']} (`{about['command']}`, since "
            f"{about['since']})"
        )
    except (ValueError, KeyError, TypeError):
        return "another process"
