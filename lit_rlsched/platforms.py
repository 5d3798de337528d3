"""Which parts need which operating system; elsewhere they are refused by name."""

import sys


def require_posix(part: str) -> None:
    """Refuse Windows.

    Args:
        part: What cannot run there, as the subject of a sentence.

    Raises:
        RuntimeError: names the part, and where it runs.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            f"{part} cannot run on Windows: Linux or macOS is needed. WSL 2 is Linux."
        )


def require_linux(part: str, instead: str) -> None:
    """Refuse everything but Linux.

    Args:
        part: What cannot run elsewhere, as the subject of a sentence.
        instead: What to do there, as a sentence.

    Raises:
        RuntimeError: names the part, the system and what to do.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"{part} runs on Linux only, and this is `{sys.platform}`. {instead}")
