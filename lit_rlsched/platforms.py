"""Refusals of features that do not run on this operating system."""

import sys


def require_posix(part: str) -> None:
    """Refuse Windows; `part` is the subject of the message's sentence.

    Raises:
        RuntimeError: this is Windows.
    """
    if sys.platform == "win32":
        raise RuntimeError(f"{part} cannot run on Windows. Use Linux, macOS or WSL 2.")


def require_linux(part: str, instead: str) -> None:
    """Refuse every system but Linux; `instead` is a sentence that says what to do.

    Raises:
        RuntimeError: this is not Linux.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"{part} runs on Linux only, and this is `{sys.platform}`. {instead}")
