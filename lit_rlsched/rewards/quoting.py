"""Quoting of texts in a judge's question, and redaction of secrets in what is logged."""

import re
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

CONTROL_TOKENS = re.compile(
    r"<\|[^<>\n]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|<[|\uff5c][^<>\n]{1,40}>"
)
"""Tokens that chat templates put between turns."""
KEYS = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S+|\b(?:sk|pk|rk|hf|gsk|xai|key|api|token)[-_][\w*.-]{6,}"
)
"""Strings that look like keys, shortened ones (`sk-ab***yz`) included."""
REDACTED = "[redacted]"
CLOSERS = set("\"'`)]}>")
"""Single characters that count as closing delimiters."""


def closing_delimiters(template: str) -> dict[str, str]:
    """Return, for each field of a template, the words after it that mark its end."""
    parts = list(Formatter().parse(template))
    after = [literal.strip().split("\n")[0].strip() for literal, *_ in parts[1:]] + [""]
    return {
        name: delimiter
        for (_, name, _, _), delimiter in zip(parts, after, strict=True)
        if name and (len(delimiter) > 1 or delimiter in CLOSERS)
    }


def quoted(value: Any, delimiter: str = "", tokens: Iterable[str] = ()) -> Any:
    """Return a value for a question, without its closing delimiter and without control tokens.

    Each of these is spelled out with spaces between its letters, so that the judge still sees it.

    Args:
        value: Text. Numbers are returned unchanged, as a template may format them.
        delimiter: Words that mark the end of the value in the question.
        tokens: Control tokens of the judge's tokenizer, besides the usual ones.
    """
    if isinstance(value, int | float):
        return value
    text = CONTROL_TOKENS.sub(_spelled_out, str(value))
    for token in tokens:
        text = text.replace(token, " ".join(token)) if len(token) > 1 else text
    words = [re.escape(word) for word in delimiter.split()]
    return re.sub(r"\s+".join(words), _spelled_out, text, flags=re.I) if words else text


def _spelled_out(found: re.Match[str]) -> str:
    text = "".join(found[0].split())
    return " ".join(text) if len(text) > 1 else f"\\{text}"


def secrets_in(key: str, base_url: str, request: Mapping[str, Any]) -> list[str]:
    """Return the key, the user and password in the address, and the values of extra headers."""
    user = re.match(r"https?://([^/@]+)@", base_url)
    found = [key, *(user[1].split(":") if user else [])]
    for name in ("extra_headers", "extra_query"):
        found += [str(value) for value in (request.get(name) or {}).values()]
    return sorted({text for text in found if len(text) >= 4}, key=len, reverse=True)


def redact(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets and without anything else that looks like a key."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return KEYS.sub(REDACTED, text)
