"""Setting of the checks: a GPU, or a CPU with tiny limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
QUICK_TASK = "examples/countdown/model"
"""Model of the quick task, relative to the root of the repository."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a check, passed to its process as JSON."""

    device: Literal["cuda", "cpu"]
    folder: str
    """Folder that it may write to."""
    models: str
    """Folder for models made from their shape."""
    model: str | None = None
    """Checkpoint to use instead of the shape of Qwen3-0.6B."""

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.device == "cuda"

    def pick(self, on_gpu: T, on_cpu: T) -> T:
        """Return the value for a GPU, or the one for the rehearsal on a CPU."""
        return on_gpu if self.on_gpu else on_cpu

    def path(self, name: str) -> Path:
        """Return the path of a file or folder of this check."""
        return Path(self.folder) / name
