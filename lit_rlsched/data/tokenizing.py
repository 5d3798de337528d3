"""Token ids of prompts: batches of rows are tokenised in threads, into arrays."""

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from lit_rlsched.data.messages import prompt_of, template_arguments, tool_arguments
from lit_rlsched.data.row_table import BATCH, Row, RowTable
from lit_rlsched.settings import UsageError, check_template_kwargs

_MOST_THREADS = 16
"""More would wait for Python's lock."""
_OWN_THREADS = "TOKENIZERS_PARALLELISM"
"""Variable with which the tokenizer's Rust part decides at each call whether to use its threads."""
_MARK = "\N{REPLACEMENT CHARACTER}observation\N{REPLACEMENT CHARACTER}"
"""Stands for what an environment adds to a prompt."""
_TAIL = 8
"""Tokens before it that it may change, as it may be merged with them."""
_AT_ONCE = 100
"""Prompts per call of the tokenizer. A call needs about 100 bytes a token."""


class RowTools(Protocol):
    """What the completions of a row may call: `environments.protocol.Environments`."""

    @property
    def key(self) -> str:
        """Everything that decides the tokens of prompts."""

    def of(self, columns: Mapping[str, Any]) -> Any:
        """Return an object with the tools' `schemas`, and a `factory` if it adds to the prompt.

        It is `seeded` if a task is made of a number.
        """


class PromptTokenizer:
    """Tokenises the prompts of rows, without truncation.

    Chat messages go through the chat template; `template_arguments` says with what. A string gets
    the tokenizer's leading special tokens, such as BOS, unless it begins with them. Trailing ones,
    such as EOS, are left out: a completion would begin after the end. If the tokenizer only calls
    its Rust part, we call that directly: Python then makes one list for each prompt, and no masks
    and offsets.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: Mapping[str, Any] | None,
        environments: RowTools | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._environments = environments
        self._settings = settings or {}
        check_template_kwargs(self._settings)
        self._backend = None
        if _is_plain(tokenizer):
            self._backend = tokenizer.backend_tokenizer
            self._backend.no_truncation()  # as `tokenizer(text)` does
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
        threads = min((os.cpu_count() or 1) + 1, _MOST_THREADS)  # one waits for Python's lock
        self.threads = 1 if self._backend is None else threads
        """Number of threads that may call it at the same time."""

    def __call__(self, rows: Sequence[Row]) -> "list[array[int]]":
        """Return the token ids of each prompt, without the end that an environment may change."""
        return self.begun(rows, self.whole(rows))

    def begun(self, rows: Sequence[Row], whole: "Sequence[array[int]]") -> "list[array[int]]":
        """Return the token ids of `whole` without the end that an environment may change."""
        if self._environments is None:
            return [*whole]
        factories = [self._environments.of(row).factory for row in rows]
        pairs = zip(whole, factories, strict=True)
        return [ids if factory is None else ids[:-_TAIL] or ids[:1] for ids, factory in pairs]

    def whole(self, rows: Sequence[Row]) -> "list[array[int]]":
        """Return the token ids of each prompt, at most to the end of the last message's text."""
        prompts = [*map(prompt_of, rows)]
        if self._environments is not None and any(isinstance(p, str) for p in prompts):
            raise UsageError(
                "A prompt is a string, and tools are called in chats. Make it a list of messages: "
                '`[{"role": "user", "content": ...}]`.'
            )
        strings = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        chats = self._of_chats([row for row in rows if not isinstance(prompt_of(row), str)])
        ids = dict(zip(strings, self._of_strings(strings), strict=True))
        return [ids[prompt] if isinstance(prompt, str) else next(chats) for prompt in prompts]

    def _of_strings(self, strings: list[str]) -> "Iterator[array[int]]":
        if not strings:
            return
        for ids in self._encoded(strings):
            begun = ids[: len(self._first)] == self._first
            yield ids if begun else self._first + ids

    @cached_property
    def _first(self) -> "array[int]":
        """The special tokens that the tokenizer puts before a text."""
        text = ["a"]
        (alone,), (whole,) = self._encoded(text), self._encoded(text, add_special_tokens=True)
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
            if observes:
                yield from self._begun([_marked(chat) for chat in chats], template)
                continue
            if self._backend is not None:
                yield from self._encoded(template(chats, tokenize=False))
                continue
            ids = template(
                chats,
                tokenize=True,
                return_dict=True,
                tokenizer_kwargs={"return_attention_mask": False},
            )["input_ids"]
            yield from (array("i", one) for one in ids)

    def _arguments(self, row: Row) -> tuple[dict[str, Any], bool]:
        """Return the arguments of the template for a row, and whether something is added to it."""
        if self._environments is None:
            return template_arguments(row, self._settings), False
        environment = self._environments.of(row)
        given = tool_arguments(row, self._settings, environment.schemas)
        return given, environment.factory is not None

    def _begun(
        self, chats: list[Any], template: Callable[..., list[str]]
    ) -> "Iterator[array[int]]":
        """Yield the tokens of chats up to the mark in their last message."""
        texts = [text.partition(_MARK) for text in template(chats, tokenize=False)]
        if not all(mark for _, mark, _ in texts):
            raise UsageError("the chat template leaves out the end of the last message.")
        yield from self._encoded([before for before, _, _ in texts])

    def _encoded(
        self, texts: list[str], add_special_tokens: bool = False
    ) -> "Iterator[array[int]]":
        if self._backend is None:
            settings = {"return_attention_mask": False, "add_special_tokens": add_special_tokens}
            ids = self._tokenizer(text=texts, **settings)["input_ids"]
            yield from (array("i", one) for one in ids)
            return
        for first in range(0, len(texts), _AT_ONCE):
            some = texts[first : first + _AT_ONCE]
            for one in self._backend.encode_batch_fast(some, add_special_tokens=add_special_tokens):
                yield array("i", one.ids)


def unknown_token(ids: Iterable[int], tokenizer: Any, embeddings: int) -> str | None:
    """Say which token of a prompt the model has no embedding for, after the prompt's name."""
    for token in ids:
        if token >= embeddings:
            name = tokenizer.convert_ids_to_tokens(token)
            return (
                f"has the token {token} ({name!r}) of the tokenizer "
                f"`{getattr(tokenizer, 'name_or_path', '')}`, and the model has embeddings for 0 "
                f"to {embeddings - 1}. Use the model's own tokenizer, or a model that was resized "
                "for this one (`resize_token_embeddings`)."
            )
    return None


def _marked(chat: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + _MARK}]


def _is_plain(tokenizer: Any) -> bool:
    """Whether a tokenizer only calls its Rust part."""
    from transformers import PreTrainedTokenizerFast as plain

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, plain)
        and not hasattr(tokenizer, "_switch_to_input_mode")
        and all(
            getattr(kind, name) is getattr(plain, name)
            for name in ("__call__", "_encode_plus", "apply_chat_template", "backend_tokenizer")
        )
    )


def token_batches(rows: RowTable, tokenize: PromptTokenizer) -> Iterator[pa.RecordBatch]:
    """Yield the columns `token_ids`, `hash` and `largest` of rows, in their order.

    `largest` is the largest token id of all prompts in the row's batch.
    The batches are made in threads: the tokenizer's Rust part releases Python's lock.
    """
    bar = tqdm(  # from two seconds on, in a terminal only
        total=len(rows), desc="Tokenizing prompts", delay=2, leave=False, disable=None
    )
    alone = _without_own_threads() if tokenize.threads > 1 else nullcontext()
    with bar, alone, ThreadPoolExecutor(tokenize.threads) as threads:
        waiting = deque[Future[pa.RecordBatch]]()
        for start in range(0, len(rows), BATCH):
            waiting.append(threads.submit(_token_batch, rows, start, tokenize))
            if len(waiting) > tokenize.threads:
                yield from _next(waiting, bar)
        while waiting:
            yield from _next(waiting, bar)


@contextmanager
def _without_own_threads() -> Iterator[None]:
    """Let the tokenizer work in its callers' threads, which takes a tenth fewer CPU seconds.

    `datasets.map` sets the same variable for its processes.
    """
    before = os.environ.get(_OWN_THREADS)
    os.environ[_OWN_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OWN_THREADS]
        else:
            os.environ[_OWN_THREADS] = before


def _next(waiting: deque[Future[pa.RecordBatch]], bar: Any) -> Iterator[pa.RecordBatch]:
    batch = waiting.popleft().result()
    yield batch
    bar.update(batch.num_rows)


def _token_batch(rows: RowTable, start: int, tokenize: PromptTokenizer) -> pa.RecordBatch:
    some = rows.prompts(start, start + BATCH)
    try:
        whole = tokenize.whole(some)
    except Exception:
        for number, row in enumerate(some, start):
            try:
                tokenize([row])
            except Exception as error:
                raise UsageError(
                    f"The prompt of row {number} cannot be tokenised: {error} "
                    f"The prompt is {str(prompt_of(row))[:80]!r}."
                ) from error
        raise
    hashes = b"".join(blake2b(one, digest_size=8).digest() for one in whole)
    ids = tokenize.begun(some, whole)
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
    flat = np.frombuffer(b"".join(ids), np.int32)
    columns = {
        "token_ids": pa.ListArray.from_arrays(ends, flat),
        "hash": np.frombuffer(hashes, ">u8").astype(np.uint64),
        "largest": np.full(len(ids), flat.max(initial=0)),
    }
    return pa.record_batch(columns)
