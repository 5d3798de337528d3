"""Arrow files in the cache of `datasets`: written once, memory-mapped by every rank."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from filelock import FileLock

BATCH = 1000
"""Rows of a record batch."""


def cache_folder() -> Path:
    """Folder of the files, in the cache of `datasets`: `HF_DATASETS_CACHE` or `HF_HOME` move it."""
    from huggingface_hub.constants import HF_HOME

    root = os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")
    return Path(root, "lit_rlsched")


def mapped(key: str | None, batches: Callable[[], Iterator[pa.RecordBatch]]) -> pa.Table:
    """Memory-map the file of a key, after writing it if there is none.

    One process writes; the others of the machine wait for it and map the same file.

    Args:
        key: Name of the content. `None`: a temporary file, for content that has no stable name. A
            folder that cannot be written has the same effect.
        batches: Makes the content, of at least one row.
    """
    if key is None or not _writable(cache_folder()):
        with TemporaryDirectory(prefix="lit_rlsched-") as folder:
            path = Path(folder, "rows.arrow")
            _write(path, batches())
            return _map(path)  # the mapping outlives the name of the file
    path = cache_folder() / f"{key}.arrow"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            try:
                _write(unfinished, batches())
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            unfinished.replace(path)
    return _map(path)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def digest(*parts: object) -> str:
    """Hash of what decides a file's content, for its key."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


def _write(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    writer = None
    with path.open("wb") as file:
        for batch in batches:
            if writer is None:
                writer = pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
        assert writer is not None, "no rows"
        writer.close()


def _map(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()
