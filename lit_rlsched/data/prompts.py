"""Rows tokenised to prompts."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.data.rows import Row
from lit_rlsched.types import Prompt, stable_hash


@dataclass(frozen=True, slots=True)
class PromptSets:
    """All prompts of a run, each tokenised once."""

    train: list[Prompt]
    held_out: dict[str, list[Prompt]]
    """Prompts by stage: `val`, `test`, `predict`."""

    @property
    def all(self) -> list[Prompt]:
        """Every prompt, those of `train` first."""
        return [*self.train, *(p for prompts in self.held_out.values() for p in prompts)]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(len(p.token_ids) for p in self.all)

    @property
    def shortest(self) -> int:
        """Number of tokens of the shortest prompt."""
        return min(len(p.token_ids) for p in self.all)


def tokenize(
    rows: Mapping[str, list[Row]],
    tokenizer: Any,
    *,
    context: int,
    max_completion_length: int,
    chat_template_kwargs: dict[str, Any] | None,
) -> PromptSets:
    """Tokenise the rows of each stage; `context` is the model's maximum number of tokens.

    Raises:
        ValueError: a prompt and its completion do not fit into the context, or a row is unusable.
    """
    if max_completion_length >= context:
        raise ValueError(
            f"`max_completion_length={max_completion_length}` leaves no room for a prompt in the "
            f"model's context of {context} tokens. Use a smaller one."
        )
    sets = {
        name: make_prompts(
            data,
            tokenizer,
            chat_template_kwargs=chat_template_kwargs,
            max_prompt_length=context - max_completion_length,
        )
        for name, data in rows.items()
    }
    train = sets.pop("train", [])
    known = {p.token_ids for p in train}
    if shared := [p for p in sets.get("val", ()) if p.token_ids in known]:
        rank_zero_warn(
            f"{len(shared)} prompts of `val_data` are in `train_data` too, the first is "
            f"{str(shared[0].text)[:80]!r}: the validation figures are not held out."
        )
    return PromptSets(train, sets)


def make_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Tokenise each prompt once, as TRL does, without truncation.

    A string goes through `tokenizer(text)`, special tokens included; chat messages through the chat
    template with the generation prompt. Of equal rows only the first is kept, with a warning.

    Args:
        rows: Rows as `load_rows` returns them.
        tokenizer: Tokenizer of the policy.
        max_prompt_length: Maximum number of tokens per prompt.
        chat_template_kwargs: Arguments for `apply_chat_template`, such as
            `{"enable_thinking": False}`.

    Raises:
        ValueError: two rows have the same uid, or a prompt is too long or has no tokens.
    """
    numbers, duplicates = unique_rows(rows)
    if duplicates:
        warnings.warn(
            f"{len(duplicates)} of {len(rows)} rows repeat an earlier row and are left out (the "
            f"first is row {duplicates[0]}: {str(rows[duplicates[0]]['prompt'])[:80]!r}). Give "
            "every row a `uid` to keep them.",
            stacklevel=2,
        )
    texts = [rows[number]["prompt"] for number in numbers.values()]
    tokenized = _tokenize(texts, tokenizer, chat_template_kwargs or {})
    prompts = []
    for uid, number in numbers.items():
        row = rows[number]
        columns = {name: value for name, value in row.items() if name not in ("prompt", "uid")}
        token_ids = tokenized[_text_key(row["prompt"])]
        prompts.append(Prompt(uid, row["prompt"], token_ids, columns))
    _check_lengths(prompts, numbers, max_prompt_length)
    return prompts


def unique_rows(rows: Sequence[Row]) -> tuple[dict[str, int], list[int]]:
    """Give every row a uid, and keep the first of equal rows.

    The uid is the column `uid`, or a hash of all columns: one prompt with two answers is two
    prompts, and a row's uid does not depend on the other rows.

    Returns:
        `{uid: row number}` in the order of the rows, and the numbers of the rows that equal an
        earlier one.

    Raises:
        ValueError: two rows have the same explicit `uid`.
    """
    numbers: dict[str, int] = {}
    duplicates = []
    for number, row in enumerate(rows):
        given = row.get("uid")
        uid = _hash_uid(row, number) if given is None else str(given)
        if uid not in numbers:
            numbers[uid] = number
        elif given is None and rows[numbers[uid]].get("uid") is None:
            duplicates.append(number)
        else:
            raise ValueError(
                f"Rows {numbers[uid]} and {number} have the same `uid` {uid!r}. A uid names one "
                "prompt: make them different, or leave the column out."
            )
    return numbers, duplicates


def _hash_uid(row: Row, number: int) -> str:
    columns = {str(name): value for name, value in row.items() if name != "uid"}

    def plain(value: Any) -> str:
        own: Any = type(value).__repr__
        if own is object.__repr__:
            raise ValueError(
                f"Row {number} has a {type(value).__name__} in its columns, which looks different "
                "in every run, so that no stable name can be made from the row. Add a column `uid`."
            )
        return repr(value)

    try:
        text = json.dumps(columns, sort_keys=True, default=plain)
    except TypeError as error:
        raise ValueError(
            f"Row {number}: no stable name can be made from its columns ({error}). "
            "Add a column `uid`, or make every key of its dicts a string."
        ) from None
    return f"{stable_hash(text):016x}"


def _text_key(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\x00" + json.dumps(prompt, default=repr)


def _tokenize(
    prompts: Sequence[Any], tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Token ids by `_text_key`."""
    unique = {_text_key(prompt): prompt for prompt in prompts}
    strings = [prompt for prompt in unique.values() if isinstance(prompt, str)]
    chats = {key: prompt for key, prompt in unique.items() if not isinstance(prompt, str)}
    tokenized: dict[str, tuple[int, ...]] = {}
    if strings:
        ids = tokenizer(text=strings)["input_ids"]
        tokenized |= zip(strings, map(tuple, ids), strict=True)
    if chats:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "The prompts are chat messages, but the tokenizer has no chat template. Use "
                "prompts that are strings, or an instruction-tuned model."
            )
        ids = tokenizer.apply_chat_template(
            list(chats.values()),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **chat_template_kwargs,
        )["input_ids"]
        tokenized |= zip(chats, map(tuple, ids), strict=True)
    return tokenized


def _check_lengths(
    prompts: Sequence[Prompt], numbers: Mapping[str, int], max_prompt_length: int
) -> None:
    for prompt in prompts:
        if not prompt.token_ids:
            raise ValueError(
                f"The prompt of row {numbers[prompt.uid]} (uid {prompt.uid}) has no tokens: "
                f"{str(prompt.text)[:80]!r}. Drop or fill the row."
            )
    long = [prompt for prompt in prompts if len(prompt.token_ids) > max_prompt_length]
    if long:
        longest = max(len(prompt.token_ids) for prompt in long)
        raise ValueError(
            f"The prompt of row {numbers[long[0].uid]} (uid {long[0].uid}) has "
            f"{len(long[0].token_ids)} tokens, but the model's context less "
            f"`max_completion_length` is {max_prompt_length}. "
            f"{len(long)} of {len(prompts)} prompts exceed it, the longest with {longest}. "
            "Prompts are never cut: filter or shorten them, or make room (a smaller "
            "`max_completion_length`, a model with a longer context)."
        )
