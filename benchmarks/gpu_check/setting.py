"""Where the checks run: on a GPU as planned, or on CPU with tiny limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
QUICK_TASK = "examples/countdown/model"
"""The quick task's model, from the root of the repository."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a check is told; JSON on the way to its process."""

    device: Literal["cuda", "cpu"]
    folder: str
    """Where it may write."""
    models: str
    """Where models made by their shape are kept."""
    model: str | None = None
    """Checkpoint to use in place of the 0.6B shape."""

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.device == "cuda"

    def pick(self, on_gpu: T, on_cpu: T) -> T:
        """The same code, with other limits."""
        return on_gpu if self.on_gpu else on_cpu

    def path(self, name: str) -> Path:
        """Of a file or folder of the check's own."""
        return Path(self.folder) / name
