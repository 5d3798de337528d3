"""Rows tokenised to prompts, once: token ids are memory-mapped, and a prompt is made when drawn."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from itertools import chain, compress, islice, starmap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lit_rlsched.data.messages import prompt_of
from lit_rlsched.data.row_table import Row, RowTable, UidIndex, digest, mapped, other_columns
from lit_rlsched.data.rows import load_rows
from lit_rlsched.data.tokenizing import PromptTokenizer, RowTools, token_batches, unknown_token
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Prompt

_FORMAT = "tokens-4"
"""Changes when token ids are stored in another way."""


class Prompts(Sequence[Prompt]):
    """Prompts of a data set, each made when it is asked for."""

    def __init__(self, rows: RowTable, tokens: pa.Table, numbers: NDArray[np.int64]) -> None:
        self._rows = rows
        self._tokens = tokens
        self._token_ids = tokens["token_ids"]
        self.numbers = numbers
        """Numbers of their rows, in ascending order."""
        self.lengths: NDArray[np.int32] = pc.list_value_length(self._token_ids).to_numpy()[numbers]
        """Number of tokens of each prompt."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = int(self.numbers[at])
        return self._prompt(number, self._rows[number])

    def __iter__(self) -> Iterator[Prompt]:
        kept = np.isin(np.arange(len(self._rows)), self.numbers)
        return starmap(self._prompt, compress(enumerate(self._rows), kept))

    def _prompt(self, number: int, row: Row) -> Prompt:
        uid, token_ids = self._rows.uids[number].as_py(), self._token_ids[number].as_py()
        return Prompt(uid, prompt_of(row), tuple(token_ids), other_columns(row))

    def subset(self, positions: Sequence[int]) -> "Prompts":
        """Return the prompts at these positions."""
        return Prompts(self._rows, self._tokens, self.numbers[np.asarray(positions)])

    @cached_property
    def uids(self) -> pa.StringArray:
        """Uids of the prompts, in order."""
        return self._rows.uids.take(pa.array(self.numbers))

    @cached_property
    def of_uid(self) -> Callable[[str], Prompt]:
        """Returns the prompt with a uid."""
        index = UidIndex(self.uids)
        return lambda uid: self[index[uid]]

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """A hash of the tokens of each prompt."""
        return self._tokens["hash"].to_numpy()[self.numbers]


@dataclass(frozen=True, slots=True)
class PromptSets:
    """All prompts of a run, each tokenised once."""

    train: Any
    """`Prompts`, a `StreamSource`, or an empty list if nothing is trained."""
    held_out: dict[str, Prompts]
    """Prompts by stage: `val`, `test`, `predict`."""

    @property
    def read(self) -> dict[str, Prompts]:
        """All sets but a stream, by stage."""
        train = {"train": self.train} if isinstance(self.train, Prompts) else {}
        return train | self.held_out

    def __len__(self) -> int:
        return sum(map(len, self.read.values()))

    def first(self, number: int) -> list[Prompt]:
        """The first prompts, those of `train` before others."""
        streamed = self.train.first(number) if self.stream else []
        return [*islice(chain(streamed, *self.read.values()), number)]

    @property
    def stream(self) -> bool:
        """Whether the training prompts are a stream."""
        return hasattr(self.train, "max_prompt_length")

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt; of a stream, of the longest that it may have."""
        streamed = self.train.max_prompt_length if self.stream else 0
        return max([streamed, *(int(prompts.lengths.max()) for prompts in self.read.values())])

    @property
    def shortest(self) -> int:
        """Number of tokens of the shortest prompt."""
        streamed = [1] if self.stream else []
        return min([*streamed, *(int(prompts.lengths.min()) for prompts in self.read.values())])


def tokenize(
    rows: Mapping[str, RowTable],
    tokenizer: Any,
    *,
    context: int,
    max_completion_length: int,
    chat_template_kwargs: dict[str, Any] | None,
    embeddings: int | None = None,
    environments: RowTools | None = None,
) -> PromptSets:
    """Tokenise the rows of each stage."""
    if max_completion_length >= context:
        raise UsageError(
            f"`max_completion_length={max_completion_length}` leaves no room for a prompt in the "
            f"model's context of {context} tokens. Use a smaller one."
        )
    sets = {}
    for name, data in rows.items():
        try:
            sets[name] = make_prompts(
                data,
                tokenizer,
                chat_template_kwargs=chat_template_kwargs,
                max_prompt_length=context - max_completion_length,
                embeddings=embeddings,
                environments=environments,
            )
        except ValueError as error:
            raise UsageError(f"`{name}_data`: {error}") from error
    train = sets.pop("train", None)
    if train is not None and "val" in sets:
        shared_at = np.flatnonzero(np.isin(sets["val"].hashes, train.hashes))
        shared = [sets["val"][int(i)] for i in shared_at]
        if environments is not None and shared:  # a task is a row, or is made of a seed
            same = {*train.uids.to_pylist()} & {p.uid for p in shared}
            shared = [
                p
                for p in shared
                if p.uid in same
                and (p.columns.keys() - {"environment"} or not environments.of(p.columns).seeded)
            ]
        if shared:
            rank_zero_warn(
                f"{len(shared)} prompts of `val_data` are in `train_data` too, the first is "
                f"{str(shared[0].text)[:80]!r}: the validation figures are not held out."
            )
    return PromptSets([] if train is None else train, sets)


def make_prompts(
    rows: RowTable | Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    embeddings: int | None = None,
    environments: RowTools | None = None,
) -> Prompts:
    """Tokenise each prompt once; see `PromptTokenizer`.

    Only the first of equal rows is kept, with a warning. Token ids of a fast tokenizer are kept in
    the cache of `datasets`: the next call with the same rows, tokenizer and chat template maps
    them.

    Args:
        rows: Rows as `load_rows` takes or returns them.
        tokenizer: Tokenizer of the policy.
        max_prompt_length: Maximum number of tokens per prompt.
        chat_template_kwargs: Arguments for `apply_chat_template`, such as
            `{"enable_thinking": False}`. Those of a row's column of this name come before them.
        embeddings: Number of the model's embeddings, if prompts are checked for them.
        environments: See `PromptTokenizer`.

    Raises:
        UsageError: two rows have the same uid, or a prompt cannot be tokenised, is too long, has no
            tokens, or one that the model has no embedding for.
    """
    table = rows if isinstance(rows, RowTable) else load_rows(rows)
    numbers, duplicates = table.unique()
    if len(duplicates):
        warnings.warn(
            f"{len(duplicates)} of {len(table)} rows repeat an earlier row and are left out (the "
            f"first is row {duplicates[0]}: {str(prompt_of(table[int(duplicates[0])]))[:80]!r}). "
            "Give every row a `uid` to keep them.",
            stacklevel=2,
        )
    if table.odd_prompts is not None:
        kind, number, row = table.odd_prompts
        warnings.warn(
            f"{number} of {len(table)} prompts are {kind} and the others are not (the first is row "
            f"{row}): the chat template is applied to chat messages only. Give all the same form.",
            stacklevel=2,
        )
    settings = chat_template_kwargs or {}
    template = str(settings.get("chat_template") or getattr(tokenizer, "chat_template", None))
    tokens = mapped(
        _key(table, tokenizer, template, settings, environments),
        lambda: token_batches(table, PromptTokenizer(tokenizer, settings, environments)),
    )
    prompts = Prompts(table, tokens, numbers)
    _check_lengths(prompts, max_prompt_length)
    largest = max(pc.max(ids.flatten()).as_py() or 0 for ids in tokens["token_ids"].chunks)
    if embeddings is not None and largest >= embeddings:
        for number, prompt in zip(numbers, prompts, strict=True):
            if why := unknown_token(prompt.token_ids, tokenizer, embeddings):
                raise UsageError(f"The prompt of row {number} (uid {prompt.uid}) {why}")
    return prompts


def _key(
    rows: RowTable,
    tokenizer: Any,
    template: str,
    settings: Mapping[str, Any],
    environments: RowTools | None = None,
) -> str | None:
    """Name of the rows' token ids; `None` if rows or tokenizer have no stable name."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or rows.key is None:
        return None
    backend.no_truncation()  # as every call does, but the first call must not change the key
    backend.no_padding()
    return digest(
        _FORMAT,
        rows.key,
        type(tokenizer).__qualname__,
        backend.to_str(),
        tokenizer.special_tokens_map,
        template,
        json.dumps(settings, sort_keys=True, default=repr),
        environments.key if environments else "",
        date.today() if "strftime_now" in template else "",
        version("transformers"),
        version("tokenizers"),
    )


def _check_lengths(prompts: Prompts, max_prompt_length: int) -> None:
    numbers, lengths = prompts.numbers, prompts.lengths
    if (empty := np.flatnonzero(lengths == 0)).size:
        prompt = prompts[int(empty[0])]
        raise UsageError(
            f"The prompt of row {numbers[empty[0]]} (uid {prompt.uid}) has no tokens: "
            f"{str(prompt.text)[:80]!r}. Drop or fill the row."
        )
    if (long := np.flatnonzero(lengths > max_prompt_length)).size:
        prompt = prompts[int(long[0])]
        raise UsageError(
            f"The prompt of row {numbers[long[0]]} (uid {prompt.uid}) has "
            f"{len(prompt.token_ids)} tokens, but the model's context less "
            f"`max_completion_length` is {max_prompt_length}. "
            f"{len(long)} of {len(prompts)} prompts exceed it, the longest with {lengths.max()}. "
            "Prompts are never cut: filter or shorten them, or make room (a smaller "
            "`max_completion_length`, a model with a longer context)."
        )
