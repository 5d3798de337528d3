"""Rows tokenised to prompts, once; a prompt is made when it is drawn."""

import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lit_rlsched.data.messages import prompt_of
from lit_rlsched.data.rows import Row, RowTable, load_rows
from lit_rlsched.data.tokenizing import PromptTokenizer, tokenized
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Prompt


class Prompts(Sequence[Prompt]):
    """Prompts of a data set, each made when it is asked for."""

    def __init__(
        self, rows: RowTable, numbers: Sequence[int], token_ids: "Sequence[array[int]]"
    ) -> None:
        self._rows = rows
        self.numbers = numbers
        """Numbers of their rows, in ascending order."""
        self.uids = [rows.uids[number] for number in numbers]
        self.token_ids = token_ids
        """Those of each prompt."""
        self.lengths: NDArray[np.int64] = np.array([*map(len, token_ids)])
        """Number of tokens of each prompt."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._prompt(at, self._rows[self.numbers[at]])

    def __iter__(self) -> Iterator[Prompt]:
        rows = enumerate(self._rows)
        for at, number in enumerate(self.numbers):
            yield self._prompt(at, next(row for i, row in rows if i == number))

    def _prompt(self, at: int, row: Row) -> Prompt:
        columns = {name: value for name, value in row.items() if name not in ("prompt", "uid")}
        return Prompt(self.uids[at], prompt_of(row), tuple(self.token_ids[at]), columns)

    def subset(self, positions: Sequence[int]) -> "Prompts":
        """Return the prompts at these positions."""
        numbers = [self.numbers[at] for at in positions]
        return Prompts(self._rows, numbers, [self.token_ids[at] for at in positions])

    @cached_property
    def of_uid(self) -> Callable[[str], Prompt]:
        """Returns the prompt with a uid."""
        index = {uid: at for at, uid in enumerate(self.uids)}
        return lambda uid: self[index[uid]]


class PromptSets:
    """All prompts of a run, each tokenised once."""

    def __init__(self, sets: dict[str, Prompts]) -> None:
        self.train: Any = sets.pop("train", [])
        """`Prompts`, or an empty list if nothing is trained."""
        self.held_out = sets
        """Prompts by stage: `val`, `test`, `predict`."""
        self.longest = max(int(prompts.lengths.max()) for prompts in self.read.values())
        """Number of tokens of the longest prompt."""
        self.shortest = min(int(prompts.lengths.min()) for prompts in self.read.values())
        """Number of tokens of the shortest prompt."""

    @property
    def read(self) -> dict[str, Prompts]:
        """All sets, by stage."""
        return ({"train": self.train} if self.train else {}) | self.held_out

    def __len__(self) -> int:
        return sum(map(len, self.read.values()))

    def first(self, number: int) -> list[Prompt]:
        """The first prompts, those of `train` before others."""
        return [*islice(chain(*self.read.values()), number)]


def tokenize(
    rows: Mapping[str, RowTable],
    tokenizer: Any,
    *,
    context: int,
    max_completion_length: int,
    environments: Any = None,
    **settings: Any,
) -> PromptSets:
    """Tokenise the rows of each stage; for `settings` see `make_prompts`."""
    if max_completion_length >= context:
        raise UsageError(
            f"`max_completion_length={max_completion_length}` leaves no room for a prompt in the "
            f"model's context of {context} tokens. Use a smaller one."
        )
    room = context - max_completion_length
    settings |= {"max_prompt_length": room, "environments": environments}
    sets = {}
    for name, data in rows.items():
        try:
            sets[name] = make_prompts(data, tokenizer, **settings)
        except ValueError as error:
            raise UsageError(f"`{name}_data`: {error}") from error
    both = {"train", "val"} <= sets.keys()
    if shared := _shared(sets["train"], sets["val"], environments) if both else []:
        rank_zero_warn(
            f"{len(shared)} prompts of `val_data` are in `train_data` too, the first is "
            f"{str(shared[0].text)[:80]!r}: the validation figures are not held out."
        )
    return PromptSets(sets)


def _shared(train: Prompts, val: Prompts, environments: Any) -> list[Prompt]:
    """Return the prompts of `val` that are in `train` too."""
    if environments is None:
        known = {*map(bytes, train.token_ids)}
        return [val[i] for i, ids in enumerate(val.token_ids) if bytes(ids) in known]
    tasks = {(p.uid, str(p.text)) for p in train}  # a task is a row, or is made of a seed
    return [
        p
        for p in val
        if (p.uid, str(p.text)) in tasks
        and (p.columns.keys() - {"environment"} or not environments.of(p.columns).seeded)
    ]


def make_prompts(
    rows: RowTable | Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    embeddings: int | None = None,
    environments: Any = None,
) -> Prompts:
    """Tokenise each prompt once; see `PromptTokenizer`.

    Only the first of equal rows is kept, with a warning.

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
    if duplicates:
        warnings.warn(
            f"{len(duplicates)} of {len(table)} rows repeat an earlier row and are left out (the "
            f"first is row {duplicates[0]}: {str(prompt_of(table[duplicates[0]]))[:80]!r}). "
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
    token_ids = [*tokenized(table, PromptTokenizer(tokenizer, chat_template_kwargs, environments))]
    prompts = Prompts(table, numbers, [token_ids[number] for number in numbers])
    lengths = prompts.lengths
    if (empty := np.flatnonzero(lengths == 0)).size:
        prompt = prompts[int(empty[0])]
        raise UsageError(
            f"The prompt of row {numbers[empty[0]]} (uid {prompt.uid}) has no tokens: "
            f"{str(prompt.text)[:80]!r}. Drop or fill the row."
        )
    if (long := np.flatnonzero(lengths > max_prompt_length)).size:
        raise UsageError(
            f"The prompt of row {numbers[long[0]]} (uid {prompts.uids[long[0]]}) has "
            f"{lengths[long[0]]} tokens, but the model's context less "
            f"`max_completion_length` is {max_prompt_length}. "
            f"{len(long)} of {len(prompts)} prompts exceed it, the longest with {lengths.max()}. "
            "Prompts are never cut: filter or shorten them, or make room (a smaller "
            "`max_completion_length`, a model with a longer context)."
        )
    if embeddings is not None:
        for at, ids in enumerate(prompts.token_ids):
            if (token := max(ids)) >= embeddings:
                raise UsageError(
                    f"The prompt of row {numbers[at]} (uid {prompts.uids[at]}) has the token "
                    f"{token} ({tokenizer.convert_ids_to_tokens(token)!r}) of the tokenizer "
                    f"`{getattr(tokenizer, 'name_or_path', '')}`, and the model has embeddings for "
                    f"0 to {embeddings - 1}. Use the model's own tokenizer, or a model that was "
                    "resized for this one (`resize_token_embeddings`)."
                )
    return prompts
