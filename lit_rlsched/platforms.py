"""Refusals of features that do not run on this operating system."""

import sys


def require_posix(part: str) -> None:
    """Refuse Windows.

    Args:
        part: Feature that cannot run there, as the subject of a sentence.

    Raises:
        RuntimeError: this is Windows.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            f"{part} cannot run on Windows. Use Linux, macOS or WSL 2, which is a Linux."
        )


def require_linux(part: str, instead: str) -> None:
    """Refuse every system but Linux.

    Args:
        part: Feature that cannot run elsewhere, as the subject of a sentence.
        instead: What to do elsewhere, as a sentence.

    Raises:
        RuntimeError: this is not Linux.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"{part} runs on Linux only, and this is `{sys.platform}`. {instead}")
