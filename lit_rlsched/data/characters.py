"""Bytes of a file of prompts to text, and text that is none."""

import re
from pathlib import Path

_OTHERS = {
    b"\x1f\x8b": ("is compressed with gzip", "Unpack it: `gunzip`."),
    b"\xff\xfe": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
    b"\xfe\xff": ("is UTF-16", "Convert it: `iconv -f UTF-16 -t UTF-8`."),
}
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def decode(raw: bytes, path: Path, line: int = 1) -> str:
    """Text of a part of a file, which is UTF-8; a byte order mark is left out.

    Args:
        raw: The part.
        path: Of the file, for errors.
        line: The number of the part's first line, from 1.

    Raises:
        ValueError: it is of another encoding; the message names the file, the line and the fix.
    """
    if line == 1 and raw[:2] in _OTHERS:
        what, fix = _OTHERS[raw[:2]]
        raise ValueError(f"`{path}`, line 1: the file {what}, not UTF-8. {fix}")
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        number = line + raw.count(b"\n", 0, error.start)
        raise ValueError(
            f"`{path}`, line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}). If the file is "
            "Latin-1, convert it: `iconv -f LATIN1 -t UTF-8`."
        ) from None


def check_characters(text: str, where: str) -> None:
    r"""Refuse halves of surrogate pairs, such as JSON's `"\ud83d"`: no tokenizer takes them.

    Raises:
        ValueError: the message names the place.
    """
    if (found := _SURROGATE.search(text)) is not None:
        raise ValueError(
            f"{where} has half of a surrogate pair in its `prompt` ({found[0]!a} at character "
            f"{found.start()}), which is no character. Repair or drop the row."
        )
