"""Checkpoints that are folders: each rank under FSDP2 has written its part of the tensors."""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load

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


def inspect_folder(path: Path) -> dict[str, Any]:
    """Read a folder without its tensors: weights are on the meta device, optimizers are empty."""
    metadata: Any = _Reader(path).read_metadata()
    for stored in metadata.storage_data.values():
        file = path / stored.relative_path
        if not file.is_file() or file.stat().st_size < stored.offset + stored.length:
            raise RuntimeError(f"its file `{file.name}` is missing or cut off")
    weights, optimizers = {}, set()
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
    return checkpoint


def read_folder(path: Path, optimizers: bool) -> dict[str, Any]:
    """Read a folder as the checkpoint that a single file would be, with whole tensors."""
    checkpoint = inspect_folder(path)
    names = [f"optimizer_{i}" for i in range(len(checkpoint.get("optimizer_states", ())))]
    tensors = _load(path, {"state_dict", *(names if optimizers else ())})
    checkpoint["state_dict"] = tensors["state_dict"]
    if names and optimizers:
        checkpoint["optimizer_states"] = [numbered(tensors[name]) for name in names]
    return checkpoint


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
    return {
        "state": {names[name]: values for name, values in state["state"].items()},
        "param_groups": groups,
    }
