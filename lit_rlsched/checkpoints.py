"""Checkpoint files: written whole or not at all, and refused in one sentence where damaged."""

import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch import Tensor
from torch.utils.serialization import config as serialization

FORMAT = 1
"""Of the data module's state in a checkpoint. 0, before formats had numbers, can be read too."""

_MARK = b"lit_rlsched crc32 "
_END = 22  # bytes of a zip file's last record, whose last two are the length of the comment
_CHUNK = 1 << 22
_SUFFIX = ".checkpoint-tmp"


class CheckpointError(ValueError):
    """A file cannot be loaded as a checkpoint, and why."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, then puts it in place; the old one stays until then.

    Whatever happens meanwhile (a kill, a full disk, a power cut), the file under the final name is
    the old one or the new one. It ends with a checksum of all its bytes, as the comment of the zip
    file that `torch.save` makes; `torch.load` reads it as any other. On loading, a file that is
    empty, cut off, changed or no checkpoint is refused; one that was written by others is checked
    by the checksums that `torch.save` gives to its parts.

    Remote paths (`s3://...`) go the way of Lightning's `TorchCheckpointIO`.

    Raises:
        CheckpointError: in `load_checkpoint`, the file is not readable as a checkpoint.
        OSError: in `save_checkpoint`, it cannot be written.

    Example::

        Trainer(plugins=[AtomicCheckpointIO()])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write the file; returns when it is on the disk."""
        if storage_options is not None or not _is_local_file_protocol(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        target = Path(str(path).removeprefix("file://"))
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        temporary = target.with_name(f".{target.name}.{os.getpid()}{_SUFFIX}")
        try:
            with temporary.open("wb") as file:
                _write(checkpoint, file)
            os.replace(temporary, target)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint cannot be written ({error.strerror}); what was there is unchanged",
                str(target),
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check the file, and load it."""
        local = _is_local_file_protocol(path) and not str(path).startswith("http")
        if local and Path(path).exists():
            check_file(path)
        with _explained(path):
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        return _checked(checkpoint, path)


def with_atomic_io(plugins: Any) -> list[Any]:
    """The Trainer's `plugins`, with an `AtomicCheckpointIO` unless one says how files are made."""
    given = [] if plugins is None else plugins if isinstance(plugins, list) else [plugins]
    if any(isinstance(plugin, CheckpointIO) for plugin in given):
        return given
    return [*given, AtomicCheckpointIO()]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint to look at it: its tensors are read when they are used.

    Raises:
        CheckpointError: the file is not readable as a checkpoint.
    """
    check_file(path)
    with _explained(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return _checked(checkpoint, path)


def check_file(path: str | Path) -> None:
    """Refuse a file that cannot be a whole checkpoint, by its bytes.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        raise _refused(path, "is a folder, and no Lightning checkpoint")
    size = path.stat().st_size
    if size == 0:
        raise _refused(path, "is empty")
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # as every file of `torch.save` begins
            raise _refused(path, "is no Lightning checkpoint: `torch.save` did not write it")
        if (comment := _comment(file, size)) is None:
            raise _refused(path, f"is cut off after {size} bytes, or damaged at its end")
        if comment.startswith(_MARK):
            if b"%08x" % _crc(file, size - len(comment) - 2) != comment.removeprefix(_MARK):
                raise _refused(path, "is damaged: its bytes do not fit its checksum")
            return
    try:
        with zipfile.ZipFile(path) as parts:
            broken = parts.testzip()
    except Exception as error:  # whatever the damage does to it
        raise _refused(path, "is damaged") from error
    if broken is not None:
        raise _refused(path, f"is damaged: `{broken}` in it does not fit its checksum")


def check_format(state: dict[str, Any]) -> None:
    """Refuse the state of a data module that was written by a version we do not know.

    Raises:
        CheckpointError: names both formats.
    """
    theirs = state.get("format", 0)
    if theirs not in range(FORMAT + 1):
        raise CheckpointError(
            f"The checkpoint has format {theirs}, written by lit_rlsched {state.get('version')}, "
            f"and this version reads formats 0 to {FORMAT}. Install the version that wrote it, or "
            "start a new run in another folder."
        )


def check_nothing_is_resumed(path: Any, datamodule: str) -> None:
    """Refuse to go on from a checkpoint that has nothing of the data module's.

    Args:
        path: What the Trainer resumes from; None: it does not.
        datamodule: Under which name the state would stand.

    Raises:
        CheckpointError: there is a path.
    """
    if path is not None:
        raise CheckpointError(
            f"`{path}` has no state of `{datamodule}`: no prompts, pool, round or counters to go "
            "on with, so the run would become another one. Resume from a checkpoint of the whole "
            "run, or start a new run without `ckpt_path`."
        )


def check_resumable(checkpoint: dict[str, Any]) -> None:
    """Refuse to go on from weights without the optimizer's state.

    Raises:
        CheckpointError: says what to use instead.
    """
    if "optimizer_states" not in checkpoint:
        raise CheckpointError(
            "The checkpoint holds the weights alone (`ModelCheckpoint(save_weights_only=True)`), "
            "and a run cannot go on without the state of the optimizer. Resume from a checkpoint "
            "of the whole run."
        )


class _Writer:
    """Takes the bytes that `torch.save` writes, and their checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            return self._file.write(data)
        except OSError as error:  # torch reports it as something else
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    writer, before = _Writer(file), serialization.save.compute_crc32
    serialization.save.compute_crc32 = True
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]
    except RuntimeError:
        if writer.error is None:
            raise
        raise writer.error from None
    finally:
        serialization.save.compute_crc32 = before
    comment = _MARK + b"%08x" % writer.crc
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", len(comment)) + comment)
    file.flush()
    os.fsync(file.fileno())


def _comment(file: IO[bytes], size: int) -> bytes | None:
    """What stands after the last record of a zip file; None where that record does not fit."""
    file.seek(max(0, size - _END - len(_MARK) - 8))
    tail = file.read()
    _, found, record = tail.rpartition(b"PK\x05\x06")
    comment = record[_END - 4 :]
    if not found or len(record) < _END - 4:
        return None
    (length,) = struct.unpack("<H", record[_END - 6 : _END - 4])
    return comment if length == len(comment) else None


def _crc(file: IO[bytes], size: int) -> int:
    """Of the first `size` bytes, and of the two that said that there is no comment."""
    file.seek(0)
    crc = 0
    while size > 0 and (data := file.read(min(size, _CHUNK))):
        crc = zlib.crc32(data, crc)
        size -= len(data)
    return zlib.crc32(b"\0\0", crc)


class _explained:
    """What goes wrong in `torch.load`, as a `CheckpointError`."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, pickle.UnpicklingError):
            why = str(error).partition("\n")[0].rstrip(".")
            raise _refused(self._path, f"cannot be unpickled: {why}") from error
        if isinstance(error, (RuntimeError, EOFError, KeyError)):
            why = str(error).partition("\n")[0].rstrip(".")
            raise _refused(self._path, f"cannot be read: {why}") from error


def _checked(checkpoint: Any, path: Any) -> dict[str, Any]:
    """Refuse what `torch.save` wrote and Lightning did not."""
    needed = ("state_dict", "pytorch-lightning_version", "global_step")
    if not isinstance(checkpoint, dict) or not all(name in checkpoint for name in needed):
        raise _refused(path, "holds tensors, and is no Lightning checkpoint")
    return checkpoint


def _refused(path: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` {why}. Use another checkpoint, or `--ckpt_path last` for the newest of the run "
        "that can be read."
    )


def _remove_leftovers(folder: Path) -> None:
    """What processes left that were killed while they wrote."""
    for path in folder.glob(f".*{_SUFFIX}"):
        if f".{os.getpid()}{_SUFFIX}" not in path.name:
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the new name last over a power cut, where folders can be synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_same_weights(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint of another model or adapter configuration.

    Raises:
        ValueError: names or shapes of the weights differ.
    """
    shapes, found = ({k: v.shape for k, v in of.items()} for of in (ours, theirs))
    if shapes != found:
        different = sorted(k for k in shapes.keys() | found.keys() if shapes.get(k) != found.get(k))
        raise ValueError(
            f"The checkpoint is of another configuration: {len(different)} weights differ, the "
            f"first is {different[0]}: {found.get(different[0])} in the checkpoint, "
            f"{shapes.get(different[0])} here. Resume with the `model` and the `lora_*` settings "
            "it was made with, or start a new run in another folder."
        )
