"""Token ids of prompts, as arrays."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any

from tqdm import tqdm

from lit_rlsched.data.messages import prompt_of, template_arguments, tool_arguments
from lit_rlsched.data.rows import Row, RowTable
from lit_rlsched.settings import UsageError, check_template_kwargs

_MARK = "\N{REPLACEMENT CHARACTER}observation\N{REPLACEMENT CHARACTER}"
"""Stands for what an environment adds to a prompt."""
_TAIL = 8
"""Tokens before it that it may change, as it may be merged with them."""
_BATCH = 200
"""Prompts per call of the tokenizer, which needs about 100 bytes a token."""


class PromptTokenizer:
    """Tokenises the prompts of rows, without truncation.

    Chat messages go through the chat template. A string gets the tokenizer's leading special
    tokens, such as BOS, unless it begins with them, and no trailing ones, such as EOS. What the
    completions of a row may call is known from `environments` (`environments.protocol`).
    """

    def __init__(
        self, tokenizer: Any, settings: Mapping[str, Any] | None, environments: Any = None
    ) -> None:
        self._tokenizer = tokenizer
        self._environments = environments
        self._settings = settings or {}
        check_template_kwargs(self._settings)

    def __call__(self, rows: Sequence[Row]) -> "list[array[int]]":
        """Return the token ids of each prompt, without the end that an environment may change."""
        prompts = [*map(prompt_of, rows)]
        if self._environments is not None and any(isinstance(p, str) for p in prompts):
            raise UsageError(
                "A prompt is a string, and tools are called in chats. Make it a list of messages: "
                '`[{"role": "user", "content": ...}]`.'
            )
        strings = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        chats = self._of_chats([row for row in rows if not isinstance(prompt_of(row), str)])
        of_strings = {}
        for string, ids in zip(strings, self._encoded(strings) if strings else (), strict=True):
            begun = ids[: len(self._first)] == self._first
            of_strings[string] = ids if begun else self._first + ids
        return [of_strings[p] if isinstance(p, str) else next(chats) for p in prompts]

    @cached_property
    def _first(self) -> "array[int]":
        """The special tokens that the tokenizer puts before a text."""
        text = ["a"]
        (alone,), (whole,) = self._encoded(text), self._encoded(text, special=True)
        for start in range(len(whole) - len(alone) + 1):
            if alone and whole[start : start + len(alone)] == alone:
                return whole[:start]
        return array("i")

    def _of_chats(self, rows: list[Row]) -> "Iterator[array[int]]":
        for (given, observes), some in groupby(rows, self._arguments):
            if not given.get("chat_template") and not getattr(
                self._tokenizer, "chat_template", None
            ):
                raise UsageError(
                    "The prompts are chat messages, but the tokenizer has no chat template. Use "
                    "prompts that are strings, or an instruction-tuned model."
                )
            template = partial(self._tokenizer.apply_chat_template, **given)
            chats = [*map(prompt_of, some)]
            if not observes:
                ids = template(
                    chats,
                    tokenize=True,
                    return_dict=True,
                    tokenizer_kwargs={"return_attention_mask": False},
                )["input_ids"]
                yield from (array("i", one) for one in ids)
                continue
            marked = [
                [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + _MARK}] for chat in chats
            ]
            texts = [text.partition(_MARK) for text in template(marked, tokenize=False)]
            if not all(mark for _, mark, _ in texts):
                raise UsageError("the chat template leaves out the end of the last message.")
            for one in self._encoded([before for before, _, _ in texts]):
                yield one[:-_TAIL] or one[:1]

    def _arguments(self, row: Row) -> tuple[dict[str, Any], bool]:
        """Return the arguments of the template for a row, and whether something is added to it."""
        if self._environments is None:
            return template_arguments(row, self._settings), False
        environment = self._environments.of(row)
        given = tool_arguments(row, self._settings, environment.schemas)
        return given, environment.factory is not None

    def _encoded(self, texts: list[str], special: bool = False) -> "Iterator[array[int]]":
        settings = {"return_attention_mask": False, "add_special_tokens": special}
        for ids in self._tokenizer(text=texts, **settings)["input_ids"]:
            yield array("i", ids)


def tokenized(rows: RowTable, tokenize: PromptTokenizer) -> "Iterator[array[int]]":
    """Yield the token ids of rows, in their order."""
    # shown from two seconds on, in a terminal only
    bar: dict[str, Any] = {"desc": "Tokenizing prompts", "delay": 2, "leave": False}
    unread = iter(tqdm(enumerate(rows), total=len(rows), disable=None, **bar))
    while numbered := [*islice(unread, _BATCH)]:
        try:
            batch = tokenize([row for _, row in numbered])
        except Exception:
            for number, row in numbered:
                try:
                    tokenize([row])
                except Exception as error:
                    raise UsageError(
                        f"The prompt of row {number} cannot be tokenised: {error} "
                        f"The prompt is {str(prompt_of(row))[:80]!r}."
                    ) from error
            raise
        yield from batch
