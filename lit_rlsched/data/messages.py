"""Chat messages as every chat template reads them, and the arguments of a row for its template.

`ControlTokens` finds tokens of templates in texts that are no part of one: replies of tools, rows.
"""

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from lit_rlsched.settings import UsageError, check_template_kwargs
from lit_rlsched.text import THOUGHTS
from lit_rlsched.types import Prompt

NO_PROMPT = [{"role": "user", "content": ""}]
"""The chat of a row without `prompt`, as in TRL: its environment says what follows."""
_INSTEAD_OF_CONTENT = ("tool_calls", *THOUGHTS)
"""Keys that a message may have in place of a content."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Columns that other trainers give to the model beside the prompt."""
RESET = "`reset`"
"""Source of what an environment adds to a prompt."""
_SHORTEST = 3
"""Characters of a token that is looked for: a tokenizer may end texts with a full stop."""

strftime_now = datetime.now().strftime
"""For templates that show the date: it must not change during a run."""


def prompt_of(row: Mapping[str, Any]) -> Any:
    """Return the prompt of a normalized row."""
    return row.get("prompt", NO_PROMPT)


def normalized(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose messages have no None and a string as `content`."""
    prompt = row.get("prompt")
    if prompt is None:  # Arrow gives a row, and a message, every key that another one has
        return {name: value for name, value in row.items() if name != "prompt"}
    if isinstance(prompt, str):
        return row if type(row) is dict else {**row}
    return {**row, "prompt": [_message(*numbered) for numbered in enumerate(prompt)]}


def check_row(row: Any, at: str) -> dict[str, Any]:
    """Return a row, which is at this place of a data set, with its messages normalized."""
    text = row.get("prompt") if type(row) is dict else None
    plain = type(text) is str and text and text.isascii() and not text.isspace()
    if plain and _MEDIA.isdisjoint(row):
        return row  # most rows: the checks below take four times as long
    if not isinstance(row, Mapping):
        raise UsageError(f"{at} is a {type(row).__name__}. It must be a dict of columns.")
    if media := [name for name in sorted(_MEDIA & row.keys()) if not _is_empty(row[name])]:
        raise UsageError(
            f"{at} has `{media[0]}`, and training is on text alone: the model would answer "
            "without it. Leave such rows out. If the prompt does not need it, remove the column, "
            "or rename it if a reward function does."
        )
    if (prompt := row.get("prompt")) is None:
        return normalized(row)
    chat = isinstance(prompt, Sequence) and all(isinstance(one, Mapping) for one in prompt)
    if not isinstance(prompt, str) and not chat:
        raise UsageError(
            f"{at} has a `prompt` that is neither a string nor chat messages, a list of dicts with "
            f"`role` and `content`: {str(prompt)[:80]!r}."
        )
    try:
        row = normalized(row)
    except ValueError as error:
        raise UsageError(f"{at} {error}") from None
    text = prompt.strip() and prompt if isinstance(prompt, str) else None
    contents = [m["content"] for m in row["prompt"]] if text is None else [text]
    if not any(contents) and prompt != NO_PROMPT:
        raise UsageError(f"{at} has an empty `prompt`. Drop or fill the row.")
    for content in contents:
        # no tokenizer takes half of a surrogate pair, such as JSON's "\ud83d"
        if not content.isascii() and (found := _SURROGATE.search(content)) is not None:
            raise UsageError(
                f"{at} has half of a surrogate pair in its `prompt` ({found[0]!a} at character "
                f"{found.start()}), which is not a character. Repair or drop the row."
            )
    return row


def _is_empty(value: Any) -> bool:
    """Whether a column of images and the like holds none."""
    if isinstance(value, Mapping):  # `datasets` stores an image as bytes and path
        value = [*value.values()]
    return all(map(_is_empty, value)) if isinstance(value, list | tuple) else value in (None, "")


def _message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = without_none(message)
    content = known.get("content")
    if not isinstance(role := known.get("role"), str) or not role:
        raise UsageError(
            f"has a message {number} without a `role`: {str(message)[:80]!r}. Chat messages are "
            "dicts with `role` and `content`."
        )
    if content is None:
        if not any(known.get(name) for name in _INSTEAD_OF_CONTENT):
            raise UsageError(
                f"has a message {number} ({role}) without a content. Chat messages are dicts with "
                "`role` and `content`: drop the message, or fill it."
            )
        content = ""
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(_text_of(part, number, role) for part in content)
    elif not isinstance(content, str):
        raise UsageError(
            f"has a message {number} ({role}) whose `content` is a {type(content).__name__}. Make "
            "it a string (`json.dumps` of an object), or a list of text parts."
        )
    return {**known, "content": content}


def _text_of(part: Any, number: int, role: str) -> str:
    known = part if isinstance(part, Mapping) else {}
    kind, text = known.get("type", "text"), known.get("text")
    if kind != "text" or not isinstance(text, str):
        what = f"the part `{kind}`" if kind != "text" else f"a part without a text ({part!s:.40})"
        raise UsageError(
            f"has {what} in the content of message {number} ({role}). Training is on text alone: "
            'leave the row out, or make it {"type": "text", "text": ...}.'
        )
    return text


def without_none(value: Any) -> Any:
    """Return a value without the entries of its dicts that are None."""
    if isinstance(value, Mapping):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_none(one) for one in value]
    return value


def template_arguments(row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` for the chat of a row."""
    given = {**settings, **(_column(row, "chat_template_kwargs", Mapping, "a dict") or {})}
    check_template_kwargs(given)
    what = "a list of tools, each with its JSON schema"
    if tools := _column(row, "tools", list, what) or given.pop("tools", None):
        given["tools"] = tools  # some templates announce an empty list
    begins = given.pop("add_generation_prompt", None)
    goes_on = given.pop("continue_final_message", None)
    if goes_on is None:  # a last message of the assistant is continued
        goes_on = not begins and prompt_of(row)[-1]["role"] == "assistant"
    if goes_on:  # not every tokenizer knows the argument
        given["continue_final_message"] = goes_on
    return {**given, "add_generation_prompt": not goes_on if begins is None else begins}


def tool_arguments(
    row: Mapping[str, Any], settings: Mapping[str, Any], schemas: Sequence[Any]
) -> dict[str, Any]:
    """Return `template_arguments` for a row whose completions may call tools with these schemas."""
    given = {**template_arguments(row, settings), "strftime_now": strftime_now}
    if schemas:
        given["tools"] = list(schemas)
    return given


def _column(row: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(f"Its column `{name}` is not JSON: {error}.") from None
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"Its column `{name}` is a {type(value).__name__}. Make it {what}.")
    return without_none(value)


class ControlTokens:
    """Counts control tokens in texts, and warns once of each place that they come from.

    The text stays as it is, as the model reads the same where it is served.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        template = str(chat_template or getattr(tokenizer, "chat_template", ""))
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        self._special = _any_of(special)
        self._any = _any_of(special | {t.content for t in added if t.content in template})
        self._warned: set[str] = set()

    def of_reply(self, text: str, source: str) -> int:
        """Return how many are in what a tool or `reset` has returned."""
        # what begins a task, as a row does, may tell the model to use tags such as `<think>`
        pattern = self._special if source == RESET else self._any
        end = "`tools/control_tokens`. Take them out there if the text comes from strangers"
        return self._count(pattern, text, source, f"{source} returned text with", end)

    def of_prompts(self, prompts: Iterable[Prompt]) -> dict[str, float]:
        """Return `rollout/control_tokens`: how many are in messages of rows, if any."""
        found, end = 0, "`rollout/control_tokens`. Take them out of the data if they are not meant"
        for prompt in prompts:
            if isinstance(prompt.text, str):  # which may be a rendered chat
                continue
            who = f"The row `{prompt.uid}` has a message with"
            for message in prompt.text:
                text = str(message.get("content", ""))
                found += self._count(self._special, text, "rows", who, end)
        return {"rollout/control_tokens": float(found)} if found else {}

    def _count(self, pattern: "re.Pattern[str]", text: str, source: str, who: str, end: str) -> int:
        found = pattern.findall(text)
        if found and source not in self._warned:
            self._warned.add(source)
            warnings.warn(
                f"{who} control tokens ({', '.join(f'`{t}`' for t in dict.fromkeys(found))}): the "
                "model reads them as those of the chat template, so a text can end its turn and "
                f"begin others. They are counted in {end} (`docs/howto/tools.md`).",
                stacklevel=2,
            )
        return len(found)


def _any_of(tokens: Iterable[str]) -> "re.Pattern[str]":
    """Return a pattern that finds tokens, but for words and spaces, which no template reserves."""
    marks = (token for token in tokens if len(token.strip()) >= _SHORTEST and not token.isalnum())
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
