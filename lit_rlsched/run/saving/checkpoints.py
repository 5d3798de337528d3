"""Checkpoints on the disk: files written at once and checked, or folders of FSDP2 ranks."""

import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
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
        temporary = temporary_name(target)
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
        sync_folder(target.parent)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check the file and load it; gather the parts of a folder that `FSDP2Strategy` wrote."""
        if is_sharded_checkpoint(path):
            return read_checkpoint(path)
        if _is_local_file_protocol(path) and not str(path).startswith("http"):
            if not Path(path).exists():
                raise CheckpointError(
                    f"There is no checkpoint `{path}` on {socket.gethostname()}. Give an existing "
                    "file. Processes on several hosts need it on each, or in a shared folder."
                )
            _check_file(path)
        with refusing(path):
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        return _checked(checkpoint, path)


def with_atomic_io(plugins: Any) -> list[Any]:
    """Return the Trainer's `plugins`, with `AtomicCheckpointIO` unless one is a `CheckpointIO`."""
    given = [] if plugins is None else plugins if isinstance(plugins, list) else [plugins]
    if any(isinstance(plugin, CheckpointIO) for plugin in given):
        return given
    return [*given, AtomicCheckpointIO()]


def read_checkpoint(
    path: str | Path, verify: bool = True, optimizers: bool = True
) -> dict[str, Any]:
    """Load a checkpoint: a file is memory-mapped and read when used, a folder is read."""
    if not is_sharded_checkpoint(path):
        _check_file(path, tensors=verify)
        with refusing(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return _checked(checkpoint, path)
    checkpoint, names = inspect_checkpoint(path), []
    if optimizers:
        names = [f"optimizer_{i}" for i in range(len(checkpoint.get("optimizer_states", ())))]
    with refusing(path):
        tensors = _load(Path(path), {"state_dict", *names})
        checkpoint["state_dict"] = tensors["state_dict"]
        if names:
            checkpoint["optimizer_states"] = [numbered(tensors[name]) for name in names]
    return checkpoint


def inspect_checkpoint(path: str | Path, verify: bool = True) -> dict[str, Any]:
    """Like `read_checkpoint`, but a folder's weights are on the meta device, optimizers empty."""
    if not is_sharded_checkpoint(path):
        return read_checkpoint(path, verify)
    path, weights, optimizers = Path(path), {}, set()
    with refusing(path):
        metadata: Any = _Reader(path).read_metadata()
        for stored in metadata.storage_data.values():
            file = path / stored.relative_path
            if not file.is_file() or file.stat().st_size < stored.offset + stored.length:
                raise RuntimeError(f"its file `{file.name}` is missing or cut off")
        for key, (part, name, *_) in metadata.planner_data.items():
            if part == "state_dict":
                about = metadata.state_dict_metadata[key]
                weights[name] = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
            else:
                optimizers.add(part)
        checkpoint = torch.load(path / REST, map_location="cpu", weights_only=True)
        checkpoint["state_dict"] = weights
    if optimizers:
        checkpoint["optimizer_states"] = [{} for _ in optimizers]
    return _checked(checkpoint, path)


@contextmanager
def refusing(path: Any) -> Iterator[None]:
    """Turn the errors of reading a checkpoint into a `CheckpointError`."""
    try:
        yield
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        verb = "unpickled" if isinstance(error, pickle.UnpicklingError) else "read"
        why = str(error).partition("\n")[0].rstrip(".")
        raise _refused(path, f"cannot be {verb}: {why}") from error


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


def _checked(checkpoint: Any, path: Any) -> dict[str, Any]:
    needed = {"state_dict", "pytorch-lightning_version", "global_step"}
    if not isinstance(checkpoint, dict) or not needed <= checkpoint.keys():
        raise _refused(path, "holds tensors, but is not a Lightning checkpoint")
    return checkpoint


def _refused(path: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{path}` {why}. Use another checkpoint, or `--ckpt_path last` for the newest readable "
        "one of the run."
    )


def temporary_name(target: Path) -> Path:
    """Make the folder of a checkpoint, and return the name under which it is written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in target.parent.glob(f".*{_SUFFIX}*"):  # of processes that were killed meanwhile
        if f".{os.getpid()}{_SUFFIX}" not in path.name:
            remove_checkpoint(path)
    return target.with_name(f".{target.name}.{os.getpid()}{_SUFFIX}")


def sync_folder(folder: Path) -> None:
    """Make the rename durable, where the file system can sync folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


REST = "meta.pt"
"""Lightning's name of the file with everything but tensors. It is written last."""
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
"""Modules of the classes that describe a folder."""
_OTHERS = ("pathlib.PosixPath", "torch.Size", "torch.serialization._get_layout")


class _Unpickler(pickle.Unpickler):
    """Refuses all classes except those that describe a folder."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _OTHERS:
            return super().find_class(module, name)
        if module in ("torch", *_MODULES) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or getattr(found, "__module__", None) in _MODULES:
                return found
        raise pickle.UnpicklingError(f"`{module}.{name}` does not belong into a checkpoint")


class _Reader(FileSystemReader):
    """Checks the file `.metadata` before PyTorch unpickles it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with Path(self.path, ".metadata").open("rb") as file:
                _Unpickler(file).load()
        except OSError as error:
            raise RuntimeError(f"its file `.metadata` cannot be read ({error.strerror})") from error
        return super().read_metadata(*args, **kwargs)


class _Planner(DefaultLoadPlanner):
    """Checks values that are not tensors before PyTorch unpickles them."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _WholePlanner(_Planner, _EmptyStateDictLoadPlanner):
    pass


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Whether a path is such a folder."""
    return (Path(path) / REST).is_file()


def _load(path: Path, keys: set[str]) -> dict[str, Any]:
    """Load what is below these keys."""
    found: dict[str, Any] = {}
    with plain_errors():
        _load_state_dict(
            found,
            storage_reader=_Reader(path),
            planner=_WholePlanner(keys=keys),  # type: ignore[no-untyped-call]
            no_dist=True,
        )
    return found


def load_groups(path: Path, name: str) -> dict[str, Any]:
    """Load an optimizer's parameter groups, with the names of their weights, but no state."""
    return {"state": {}, **_load(path, {f"{name}.param_groups"})[name]}


def load_parts(path: Path, name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Load this rank's parts of the tensors into a state of the same form; return it."""
    found = {name: state}
    with plain_errors():
        load(found, storage_reader=_Reader(path), planner=_Planner())
    return found[name]


def replace_folder(new: Path, path: Path) -> None:
    """Rename a complete folder; remove the file or folder that had the name before."""
    if path.is_dir():
        old = new.with_name(f"{new.name}-old")
        path.rename(old)
        new.rename(path)
        shutil.rmtree(old)
    else:
        path.unlink(missing_ok=True)
        new.rename(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the errors of `torch.distributed.checkpoint`, which are no `Exception`s, into such."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, OSError):
            raise OSError(first.errno, os.strerror(first.errno or 0)) from error
        raise RuntimeError(str(first)) from error


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers of parameters in place of their names."""
    names = [name for group in state.get("param_groups", ()) for name in group["params"]]
    return renamed(state, {name: i for i, name in enumerate(names)}) if names else {}


def renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with other names of its parameters."""
    groups = [
        {**group, "params": [names[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {names[name]: of for name, of in state["state"].items()}
    return {"state": values, "param_groups": groups}
