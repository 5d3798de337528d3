"""Finds tokens of chat templates in texts that are no part of one: replies of tools, and rows."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

from lit_rlsched.types import Prompt

RESET = "`reset`"
"""Source of what an environment adds to a prompt."""
_SHORTEST = 3
"""Characters of a token that is looked for: a tokenizer may end texts with a full stop."""


class ControlTokens:
    """Counts control tokens in texts, and warns once of each place that they come from.

    A tokenizer makes the token that ends a turn of the text `<|im_end|>`, wherever that stands. The
    text stays as it is, as the model reads the same where it is served.
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
        return self._count(
            self._special if source == RESET else self._any,
            text,
            source,
            f"{source} returned text with",
            "`tools/control_tokens`. Take them out there if the text comes from strangers",
        )

    def of_prompts(self, prompts: Iterable[Prompt]) -> dict[str, float]:
        """Return `rollout/control_tokens`: how many are in the messages of rows, if there are any.

        A prompt that is a string may be a rendered chat, so it is not looked at.
        """
        found = sum(
            self._count(
                self._special,
                str(message.get("content", "")),
                "rows",
                f"The row `{prompt.uid}` has a message with",
                "`rollout/control_tokens`. Take them out of the data if they are not meant",
            )
            for prompt in prompts
            if not isinstance(prompt.text, str)
            for message in prompt.text
        )
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
