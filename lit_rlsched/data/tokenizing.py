"""Token ids of prompts: batches of rows are tokenised in threads, into arrays."""

import os
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from lit_rlsched.data.arrow_cache import BATCH
from lit_rlsched.data.row_table import RowTable

_MOST_THREADS = 16
"""More would wait for Python's lock."""
_OWN_THREADS = "TOKENIZERS_PARALLELISM"
"""Variable with which the tokenizer's Rust part decides at each call whether to use its threads."""
_AT_ONCE = 100
"""Prompts in a call of the tokenizer, which needs about 100 bytes a token while it lasts."""
_CUTS = {"padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask"}
"""Arguments of `apply_chat_template` that change what is done with its text."""


class PromptTokenizer:
    """Tokenises prompts as TRL does, without truncation.

    A string goes through `tokenizer(text)`, special tokens included; chat messages through the chat
    template with the generation prompt. Where these only call the tokenizer's Rust part, it is
    called directly: Python then makes one list for each prompt, and no masks and offsets.

    Args:
        tokenizer: Tokenizer of the policy.
        settings: Arguments for `apply_chat_template`.
    """

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings or {}
        self._backend = None
        if _is_plain(tokenizer) and not _CUTS & self._settings.keys():
            self._backend = tokenizer.backend_tokenizer
            self._backend.no_truncation()  # as `tokenizer(text)` does
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
        threads = min((os.cpu_count() or 1) + 1, _MOST_THREADS)  # one waits for Python's lock
        self.threads = 1 if self._backend is None else threads
        """Number of threads that may call it at the same time."""

    def __call__(self, prompts: Sequence[Any]) -> "list[array[int]]":
        """Return the token ids of each prompt.

        Args:
            prompts: Strings and chat messages.

        Raises:
            ValueError: the tokenizer has no chat template for chat messages.
        """
        strings = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        chats = self._of_chats([prompt for prompt in prompts if not isinstance(prompt, str)])
        ids = dict(zip(strings, self._of_strings(strings), strict=True))
        return [ids[prompt] if isinstance(prompt, str) else next(chats) for prompt in prompts]

    def _of_strings(self, strings: list[str]) -> "Iterator[array[int]]":
        if self._backend is not None:
            yield from self._encoded(strings, add_special_tokens=True)
        elif strings:
            ids = self._tokenizer(text=strings, return_attention_mask=False)["input_ids"]
            yield from (array("i", one) for one in ids)

    def _of_chats(self, chats: list[Any]) -> "Iterator[array[int]]":
        if not chats:
            return
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ValueError(
                "The prompts are chat messages, but the tokenizer has no chat template. Use "
                "prompts that are strings, or an instruction-tuned model."
            )
        template = partial(
            self._tokenizer.apply_chat_template, add_generation_prompt=True, **self._settings
        )
        if self._backend is not None:
            yield from self._encoded(template(chats, tokenize=False), add_special_tokens=False)
            return
        ids = template(
            chats,
            tokenize=True,
            return_dict=True,
            tokenizer_kwargs={"return_attention_mask": False},
        )["input_ids"]
        yield from (array("i", one) for one in ids)

    def _encoded(self, texts: list[str], add_special_tokens: bool) -> "Iterator[array[int]]":
        assert self._backend is not None
        for first in range(0, len(texts), _AT_ONCE):
            some = texts[first : first + _AT_ONCE]
            for one in self._backend.encode_batch_fast(some, add_special_tokens=add_special_tokens):
                yield array("i", one.ids)


def _is_plain(tokenizer: Any) -> bool:
    """Whether calling a tokenizer does no more than to call its Rust part."""
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
    """Yield the columns `token_ids` and `hash` of rows, in their order.

    The batches are made in threads: the tokenizer's Rust part releases Python's lock.

    Raises:
        ValueError: a prompt cannot be tokenised; the message has the row's number.
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
    """Let the tokenizer work in the threads that call it, which takes a tenth fewer CPU seconds.

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
    prompts = rows.prompts(start, start + BATCH)
    try:
        ids = tokenize(prompts)
    except Exception:
        for number, prompt in enumerate(prompts, start):
            try:
                tokenize([prompt])
            except Exception as error:
                raise ValueError(
                    f"The prompt of row {number} cannot be tokenised: {error} "
                    f"The prompt is {str(prompt)[:80]!r}."
                ) from error
        raise
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
    hashes = b"".join(blake2b(one, digest_size=8).digest() for one in ids)
    columns = {
        "token_ids": pa.ListArray.from_arrays(ends, np.frombuffer(b"".join(ids), np.int32)),
        "hash": np.frombuffer(hashes, ">u8").astype(np.uint64),
    }
    return pa.record_batch(columns)
