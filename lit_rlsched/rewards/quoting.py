"""Text of others in a judge's question, and secrets in what is said about an endpoint."""

import re
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

CONTROL_TOKENS = re.compile(
    r"<\|[^<>\n]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|<[|\uff5c][^<>\n]{1,40}>"
)
"""What chat templates put between turns."""
SECRETS = re.compile(
    r"(?i)\b(?:bearer|basic)\s+\S+|\b(?:sk|pk|rk|hf|gsk|xai|key|api|token)[-_][\w*.-]{6,}"
)
"""What keys look like, cut ones (`sk-ab***yz`) included."""
REDACTED = "[redacted]"
CLOSERS = set("\"'`)]}>")
"""Single characters that end what they enclose; others only separate."""


def closing_delimiters(template: str) -> dict[str, str]:
    """What ends each field of a template: the first words after it, on one line."""
    parts = list(Formatter().parse(template))
    after = [literal.strip().split("\n")[0].strip() for literal, *_ in parts[1:]] + [""]
    return {
        name: delimiter
        for (_, name, _, _), delimiter in zip(parts, after, strict=True)
        if name and (len(delimiter) > 1 or delimiter in CLOSERS)
    }


def quoted(value: Any, delimiter: str = "", tokens: Iterable[str] = ()) -> Any:
    """A value to put into a question, in which neither the delimiter nor a control token stands.

    Each is spelled out, its letters apart, so that the judge still sees what was written.

    Args:
        value: Text; numbers are left as they are, for a template may format them.
        delimiter: What ends it in the question.
        tokens: Control tokens of the judge's tokenizer, beside the usual ones.
    """
    if isinstance(value, int | float):
        return value
    text = CONTROL_TOKENS.sub(_apart, str(value))
    for token in tokens:
        text = text.replace(token, " ".join(token)) if len(token) > 1 else text
    words = [re.escape(word) for word in delimiter.split()]
    return re.sub(r"\s+".join(words), _apart, text, flags=re.IGNORECASE) if words else text


def _apart(found: re.Match[str]) -> str:
    text = "".join(found[0].split())
    return " ".join(text) if len(text) > 1 else f"\\{text}"


def secrets_in(key: str, base_url: str, request: Mapping[str, Any]) -> list[str]:
    """What must not be told: the key, a password in the address, texts in extra headers."""
    user = re.match(r"https?://([^/@]+)@", base_url)
    found = [key, *(user[1].split(":") if user else [])]
    for name in ("extra_headers", "extra_query"):
        found += [str(value) for value in (request.get(name) or {}).values()]
    return sorted({text for text in found if len(text) >= 4}, key=len, reverse=True)


def redact(text: str, secrets: Iterable[str]) -> str:
    """The text without these, and without what else looks like a key."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return SECRETS.sub(REDACTED, text)
