"""Rows become prompts, tokenised once; a resumable cursor draws them."""

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_rlsched.data.rows import Row, Rows, check_row, load_rows
from lit_rlsched.types import Prompt, stable_hash

__all__ = [
    "DomainSource",
    "Draw",
    "PromptSource",
    "Rows",
    "load_rows",
    "make_prompts",
    "unique_rows",
]


def unique_rows(rows: Sequence[Row]) -> tuple[dict[str, tuple[int, Row]], list[int]]:
    """Name every row, and keep one of those that are equal.

    A row's name is its `uid`, or a hash of the prompt and of every other column: one prompt with
    two answers is two prompts, and a row is called the same whatever the other rows are.

    Returns:
        `{uid: (row number, row)}` in the order of the rows, and the numbers of the rows that equal
        an earlier one.

    Raises:
        ValueError: two rows have the same explicit `uid`.
    """
    named: dict[str, tuple[int, Row]] = {}
    duplicates = []
    for number, row in enumerate(rows):
        given = row.get("uid")
        uid = _hash_uid(row, number) if given is None else str(given)
        if uid not in named:
            named[uid] = (number, row)
        elif given is None and named[uid][1].get("uid") is None:
            duplicates.append(number)
        else:
            raise ValueError(
                f"Rows {named[uid][0]} and {number} have the same `uid` {uid!r}. A uid names one "
                "prompt: make them different, or leave the column out."
            )
    return named, duplicates


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


def make_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Tokenise each prompt once, the way TRL does, and cut none of them.

    A string goes through `tokenizer(text)`, special tokens included; chat messages through the chat
    template with the generation prompt. Equal rows are kept once, with a warning.

    Args:
        rows: what `load_rows` gave.
        tokenizer: of the policy.
        max_prompt_length: most tokens that a prompt may have.
        chat_template_kwargs: handed to `apply_chat_template`, e.g. `{"enable_thinking": False}`.

    Raises:
        ValueError: a uid occurs twice, or a prompt is too long or empty; the message names it.
    """
    for number, row in enumerate(rows):
        check_row(row, f"Row {number} (the first is 0)")
    named, duplicates = unique_rows(rows)
    if duplicates:
        warnings.warn(
            f"{len(duplicates)} of {len(rows)} rows repeat an earlier row and are left out (the "
            f"first is row {duplicates[0]}: {str(rows[duplicates[0]]['prompt'])[:80]!r}). Give "
            "every row a `uid` to keep them.",
            stacklevel=2,
        )
    tokenized = _tokenize(
        [row["prompt"] for _, row in named.values()], tokenizer, chat_template_kwargs or {}
    )
    prompts = []
    for uid, (_, row) in named.items():
        columns = {name: value for name, value in row.items() if name not in ("prompt", "uid")}
        token_ids = tokenized[_text_key(row["prompt"])]
        prompts.append(Prompt(uid, row["prompt"], token_ids, columns))
    _check_lengths(prompts, named, max_prompt_length)
    return prompts


def _text_key(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\x00" + json.dumps(prompt, default=repr)


def _tokenize(
    prompts: Sequence[Any], tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    unique = {_text_key(prompt): prompt for prompt in prompts}
    strings = [prompt for prompt in unique.values() if isinstance(prompt, str)]
    chats = {key: prompt for key, prompt in unique.items() if not isinstance(prompt, str)}
    tokenized: dict[str, tuple[int, ...]] = {}
    if strings:
        tokenized.update(
            zip(strings, map(tuple, tokenizer(text=strings)["input_ids"]), strict=True)
        )
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
        tokenized.update(zip(chats, map(tuple, ids), strict=True))
    return tokenized


def _check_lengths(
    prompts: Sequence[Prompt], named: Mapping[str, tuple[int, Row]], max_prompt_length: int
) -> None:
    for prompt in prompts:
        if not prompt.token_ids:
            raise ValueError(
                f"The prompt of row {named[prompt.uid][0]} (uid {prompt.uid}) has no tokens: "
                f"{str(prompt.text)[:80]!r}. Drop or fill the row."
            )
    long = [prompt for prompt in prompts if len(prompt.token_ids) > max_prompt_length]
    if long:
        longest = max(len(prompt.token_ids) for prompt in long)
        raise ValueError(
            f"The prompt of row {named[long[0].uid][0]} (uid {long[0].uid}) has "
            f"{len(long[0].token_ids)} tokens, but the model's context less "
            f"`max_completion_length` is {max_prompt_length}. "
            f"{len(long)} of {len(prompts)} prompts pass it, the longest with {longest}. "
            "Prompts are never cut: filter or shorten them, or make room (a smaller "
            "`max_completion_length`, a model with a longer context)."
        )


class Draw(NamedTuple):
    """A prompt, and which pass over the data set it was drawn in."""

    prompt: Prompt
    epoch: int

    @property
    def key(self) -> str:
        """Names this visit to the prompt: another pass has another key."""
        return f"{self.prompt.uid}@{self.epoch}"


class PromptSource:
    """A cursor over prompts: every prompt once per pass, each pass in an order of its own.

    The order of a pass follows from the seed and the number of the pass alone, so the state is a
    few numbers however large the data set is. A draw that reaches the end of a pass goes on with
    the next one, and takes those prompts of it that are not in the draw yet; the ones it stepped
    over come first in the next draw.

    Args:
        prompts: what `make_prompts` gave.
        seed: of the order.
        shuffle: False keeps the order of the data set in every pass.

    Example:
        >>> source = PromptSource([Prompt("a", "?", (1,)), Prompt("b", "!", (2,))], seed=0)
        >>> sorted(prompt.uid for prompt, epoch in source.draw(2))
        ['a', 'b']
        >>> source.state_dict()["epoch"]
        1
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ValueError("A prompt source needs at least one prompt.")
        self.prompts = list(prompts)
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """The pass over the data set that the next prompt comes from."""
        self.offset = 0
        """How far the order of this pass has been walked."""
        self._deferred: list[tuple[int, int]] = []  # stepped over, each with its pass
        uids = [prompt.uid for prompt in self.prompts]
        if len(set(uids)) < len(uids):
            raise ValueError(
                "Two prompts have the same uid. `make_prompts` makes sure they do not."
            )
        self._indices = {uid: index for index, uid in enumerate(uids)}
        self._fingerprint = f"{len(uids)} prompts, {stable_hash(*uids):016x}"

    def __len__(self) -> int:
        return len(self.prompts)

    def draw(self, n: int, besides: Collection[str] = ()) -> list[Draw]:
        """Take the next `n` prompts, all different.

        Args:
            n: How many.
            besides: Uids of prompts that are passed over; they come in the next draw without them.

        Raises:
            ValueError: there are fewer than `n` such prompts.
        """
        if not 0 <= n <= len(self) - len(besides):
            raise ValueError(
                f"`prompts_per_round={n + len(besides)}`: a round draws each prompt at most once, "
                f"and there are {len(self)}. Use {len(self)} or less, or a larger data set."
            )
        drawn: list[tuple[int, int]] = []
        taken = {self._indices[uid] for uid in besides}
        while len(drawn) < n:
            index, epoch = self._next(taken)
            taken.add(index)
            drawn.append((index, epoch))
            if self.offset == len(self) and not self._deferred:
                self.epoch, self.offset = self.epoch + 1, 0
        return [Draw(self.prompts[index], epoch) for index, epoch in drawn]

    def _next(self, taken: set[int]) -> tuple[int, int]:
        """The next prompt that is not in `taken`, and its pass."""
        for position, (index, _) in enumerate(self._deferred):
            if index not in taken:
                return self._deferred.pop(position)
        order = self.order(self.epoch)
        for index in map(int, order[self.offset :]):
            self.offset += 1
            if index not in taken:
                return index, self.epoch
            self._deferred.append((index, self.epoch))
        self.epoch, self.offset = self.epoch + 1, 0
        return self._next(taken)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Indices of `prompts` in the order of one pass."""
        return _order(len(self), self.seed if self.shuffle else None, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, a few numbers, and what it is a position in."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "deferred": list(self._deferred),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ValueError: the position belongs to other prompts, or to another order of them.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"The checkpoint was made with another data set ({state['fingerprint']}) than this "
                f"one ({self._fingerprint}). Resume with the same prompts in the same order, or "
                "start a new run from the weights alone."
            )
        for name in ("seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"The checkpoint was made with `{name}={state[name]}`, this run has `{name}="
                    f"{getattr(self, name)}`: the order of the prompts would change in mid-pass. "
                    f"Resume with `{name}={state[name]}`."
                )
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self._deferred = [(int(index), int(epoch)) for index, epoch in state["deferred"]]


class DomainSource:
    """A `PromptSource` for each domain: every prompt once per pass over its domain.

    Args:
        prompts: What `make_prompts` gave.
        seed: Of the order.
        shuffle: See `PromptSource`.
        domain_of: The domain of a prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool,
        domain_of: Callable[[Prompt], str | None],
    ) -> None:
        parts: dict[str | None, list[Prompt]] = {}
        for prompt in prompts:
            parts.setdefault(domain_of(prompt), []).append(prompt)
        self.sources = {d: PromptSource(part, seed, shuffle) for d, part in parts.items()}
        self._domains = {prompt.uid: d for d, part in parts.items() for prompt in part}

    def __len__(self) -> int:
        return len(self._domains)

    @property
    def domains(self) -> Collection[str | None]:
        """Of its prompts."""
        return self.sources.keys()

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Draw]:
        """Take the next `n` prompts of a domain, all different; see `PromptSource.draw`.

        Raises:
            ValueError: there are fewer than `n` such prompts.
        """
        return self.sources[domain].draw(n, self._of(besides, domain))

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        """How many prompts of a domain can be drawn beside these."""
        return len(self.sources[domain]) - len(self._of(besides, domain))

    def _of(self, uids: Collection[str], domain: str | None) -> list[str]:
        return [uid for uid in uids if self._domains[uid] == domain]

    def state_dict(self) -> dict[str, Any]:
        """The position in each domain."""
        return {"domains": [(d, s.state_dict()) for d, s in self.sources.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these positions.

        Raises:
            ValueError: they belong to other prompts, or to other domains.
        """
        saved = dict(state["domains"]) if "domains" in state else {None: state}
        if saved.keys() != self.sources.keys():
            raise ValueError(
                f"The checkpoint was made with prompts of {_names(saved)}, this run draws from "
                f"{_names(self.sources)}. Resume with the `per_domain` it was made with, or start "
                "a new run from the weights alone."
            )
        for domain, source in self.sources.items():
            source.load_state_dict(saved[domain])


def _names(domains: Iterable[str | None]) -> str:
    named = sorted(domain for domain in domains if domain is not None)
    return f"the domains {named}" if named else "one domain"


@lru_cache(maxsize=4)
def _order(size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    if seed is None:
        return np.arange(size)
    # Raw words of Philox: NumPy may change `Generator.permutation` from version to version.
    words = np.random.Philox(key=stable_hash("prompt order", seed, epoch)).random_raw(size)
    return np.argsort(words, kind="stable")
