"""Checkpoints on the disk: files that are written at once, and checked before they are read."""

import os
import pickle
import socket
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch.utils.serialization import config as serialization

from lit_rlsched.settings import UsageError

_SUFFIX = ".checkpoint-tmp"


class CheckpointError(UsageError):
    """A file or its contents cannot be used as a checkpoint."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint to a temporary file beside its target, then rename it.

    Whatever happens meanwhile (a kill, a full disk, a power cut), the file under the final name is
    the old one or the new one, whole. Loading verifies the checksums that `torch.save` writes and
    refuses a file that is empty, cut off, damaged or not a checkpoint.

    Remote paths (`s3://...`) are left to Lightning's `TorchCheckpointIO`.

    Example::

        Trainer(plugins=[AtomicCheckpointIO()])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write the file; return when it is on the disk."""
        if storage_options is not None or not _is_local_file_protocol(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        target = Path(str(path).removeprefix("file://"))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}{_SUFFIX}")
        for left in target.parent.glob(f".*{_SUFFIX}*"):  # of processes that were killed meanwhile
            if f".{os.getpid()}{_SUFFIX}" not in left.name:
                left.unlink(missing_ok=True)
        try:
            checksums = serialization.patch("save.compute_crc32", True)  # type: ignore[attr-defined]
            with temporary.open("wb") as file, checksums:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except (OSError, RuntimeError) as error:
            # torch.save raises a RuntimeError of its own while it handles the file's OSError
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise OSError(
                cause.errno,
                f"the checkpoint cannot be written ({cause.strerror}); the file that was there "
                "before is unchanged",
                str(target),
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        with suppress(OSError):  # some file systems cannot sync folders
            descriptor = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # makes the rename durable
            finally:
                os.close(descriptor)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check the file and load it."""
        if _is_local_file_protocol(path) and not str(path).startswith("http"):
            if not Path(path).exists():
                raise CheckpointError(
                    f"There is no checkpoint `{path}` on {socket.gethostname()}. Give an existing "
                    "file. Processes on several hosts need it on each, or in a shared folder."
                )
            _check_file(path)
        load = super().load_checkpoint
        return _loaded(path, lambda: load(path, *args, **kwargs))


def with_atomic_io(plugins: Any) -> list[Any]:
    """Return the Trainer's `plugins`, with `AtomicCheckpointIO` unless one is a `CheckpointIO`."""
    given = [] if plugins is None else plugins if isinstance(plugins, list) else [plugins]
    if any(isinstance(plugin, CheckpointIO) for plugin in given):
        return given
    return [*given, AtomicCheckpointIO()]


def read_checkpoint(path: str | Path, verify: bool = True) -> dict[str, Any]:
    """Load a checkpoint. It is memory-mapped, so weights are read when they are used."""
    _check_file(path, tensors=verify)
    how: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "mmap": True}
    return _loaded(path, lambda: torch.load(path, **how))


def _loaded(path: Any, load: Callable[[], Any]) -> dict[str, Any]:
    """Return what `load` reads; refuse what cannot be read, and what is no checkpoint."""
    try:
        checkpoint = load()
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        verb = "unpickled" if isinstance(error, pickle.UnpicklingError) else "read"
        why = str(error).partition("\n")[0].rstrip(".")
        raise _refused(path, f"cannot be {verb}: {why}") from error
    needed = {"state_dict", "pytorch-lightning_version", "global_step"}
    if not isinstance(checkpoint, dict) or not needed <= checkpoint.keys():
        raise _refused(path, "holds tensors, but is not a Lightning checkpoint")
    return checkpoint


def _check_file(path: str | Path, tensors: bool = True) -> None:
    """Refuse a file whose bytes are not those of a whole checkpoint."""
    path = Path(path)
    if path.is_dir():
        raise _refused(path, "is a folder, not a Lightning checkpoint")
    if (size := path.stat().st_size) == 0:
        raise _refused(path, "is empty")
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # torch.save writes a zip file
            raise _refused(path, "is not a Lightning checkpoint: `torch.save` did not write it")
    try:
        with zipfile.ZipFile(path) as parts:
            if not tensors:
                parts.filelist = [one for one in parts.filelist if "/data/" not in one.filename]
            broken = parts.testzip()
    except Exception as error:  # zipfile raises many kinds of errors on damaged headers
        raise _refused(path, f"is damaged, or cut off after {size} bytes") from error
    if broken is not None:
        raise _refused(path, f"is damaged: its part `{broken}` does not match its checksum")


def _refused(path: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` {why}. Use another checkpoint, or `--ckpt_path last` for the newest readable "
        "one of the run."
    )
