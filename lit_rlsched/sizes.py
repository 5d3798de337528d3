"""Bytes as people write and read them."""

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(size: str | int, setting: str) -> int:
    """Read a size such as `2GiB`, `512 MB` or a number of bytes.

    Args:
        size: What was given.
        setting: As what, for the error.

    Raises:
        ValueError: it is not a size, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper(), 0) if match else 0
    if not match or float(match[1]) * unit < 1:
        raise ValueError(f"`{setting}={size!r}`: expected a size such as '2GiB' or '512MB'.")
    return int(float(match[1]) * unit)


def format_bytes(count: int) -> str:
    """A number of bytes such as `1.72 GiB`; `-` for none."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B" if count else "-"
