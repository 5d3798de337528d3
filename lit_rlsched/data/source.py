"""Sources of prompts: cursors over the data, or a stream of it, that a checkpoint can restore."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_rlsched.data.messages import check_prompt, check_row, columns_of, prompt_of
from lit_rlsched.data.row_table import Row, other_columns, row_uid
from lit_rlsched.data.rows import each, is_json, located
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group, Prompt, stable_hash

BUFFER = 1000
"""Rows among which a shuffled stream draws the next one: the default of `datasets`."""

PackedPrompt = tuple[str, str, list[int], str]


class Draw(NamedTuple):
    """A prompt with the number of the pass over the data in which it was drawn."""

    prompt: Prompt
    epoch: int

    @property
    def key(self) -> str:
        """Unique name of this draw; the next pass has another key for the prompt."""
        return f"{self.prompt.uid}@{self.epoch}"


class PromptSource:
    """A cursor over prompts: every prompt once per pass, each pass in a different order.

    The order of a pass depends on the seed and the number of the pass only, so the state is a few
    numbers whatever the size of the data set. A draw that reaches the end of a pass continues with
    the next one and skips the prompts it already has; skipped prompts come first in the next draw.

    Args:
        prompts: Prompts with different uids, as `make_prompts` returns them.
        seed: Seed of the order.
        shuffle: Whether to shuffle; False keeps the order of the data set in every pass.
        multiple: A pass has a multiple of this number of prompts; others of it are left out.

    Example:
        >>> source = PromptSource([Prompt("a", "?", (1,)), Prompt("b", "!", (2,))], seed=0)
        >>> sorted(prompt.uid for prompt, epoch in source.draw(2))
        ['a', 'b']
        >>> source.state_dict()["epoch"]
        1
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, multiple: int = 1
    ) -> None:
        uids = getattr(prompts, "uids", None)
        self.prompts = list(prompts) if uids is None else prompts
        if uids is None:
            uids = [prompt.uid for prompt in prompts]
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """Number of the pass that the next prompt comes from."""
        self.offset = 0
        """Position in the order of this pass."""
        self._deferred: list[tuple[int, int]] = []
        """Skipped prompts: index and pass."""
        self._pass = len(self.prompts) // multiple * multiple
        self._indices = {uid: index for index, uid in enumerate(uids)}
        self._fingerprint = f"{len(uids)} prompts, {stable_hash(*uids):016x}"

    def __len__(self) -> int:
        return len(self.prompts)

    def __contains__(self, uid: str) -> bool:
        return uid in self._indices

    def draw(self, n: int, besides: Collection[str] = ()) -> list[Draw]:
        """Take the next `n` prompts, all different, and none with a uid in `besides`.

        Raises:
            UsageError: there are fewer than `n` such prompts.
        """
        most = len(self) if self.shuffle else self._pass
        if not 0 <= n <= most - len(besides):
            raise UsageError(
                f"`prompts_per_round={n + len(besides)}`: a round draws each prompt at most once, "
                f"and there are {most}. Use {most} or less, or a larger data set."
            )
        drawn: list[tuple[int, int]] = []
        taken = {self._indices[uid] for uid in besides}
        while len(drawn) < n:
            index, epoch = self._next(taken)
            taken.add(index)
            drawn.append((index, epoch))
            if self.offset >= self._pass and not self._deferred:
                self.epoch, self.offset = self.epoch + 1, 0
        return [Draw(self.prompts[index], epoch) for index, epoch in drawn]

    def _next(self, taken: set[int]) -> tuple[int, int]:
        """Index and pass of the next prompt that is not in `taken`."""
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
        return _order(len(self), self.seed if self.shuffle else None, epoch)[: self._pass]

    def state_dict(self) -> dict[str, Any]:
        """The position, and a fingerprint of the prompts and their order."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "deferred": list(self._deferred),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; one in other prompts, or in another order of them, is refused."""
        if state["fingerprint"] != self._fingerprint:
            raise UsageError(
                f"The checkpoint was made with another data set ({state['fingerprint']}) than this "
                f"one ({self._fingerprint}). Resume with the same prompts in the same order, or "
                "start a new run from the weights alone."
            )
        check_same_order(state, self.seed, self.shuffle)
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self._deferred = [(int(index), int(epoch)) for index, epoch in state["deferred"]]


def check_same_order(state: Mapping[str, Any], seed: int, shuffle: bool) -> None:
    """Refuse a position in prompts that come in another order."""
    for name, ours in (("seed", seed), ("shuffle", shuffle)):
        if state[name] != ours:
            raise UsageError(
                f"The checkpoint was made with `{name}={state[name]}`, this run has `{name}="
                f"{ours}`: the order of the prompts would change within a pass. "
                f"Resume with `{name}={state[name]}`."
            )


class DomainSource:
    """One `PromptSource` per domain."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool,
        domain_of: Callable[[Prompt], str | None] | None,
        multiple: int = 1,
    ) -> None:
        parts: dict[str | None, Sequence[Prompt]] = {None: prompts}
        if domain_of is not None:
            positions: dict[str | None, list[int]] = {}
            for position, prompt in enumerate(prompts):
                positions.setdefault(domain_of(prompt), []).append(position)
            subset = getattr(prompts, "subset", lambda at: [prompts[i] for i in at])
            parts = {domain: subset(at) for domain, at in positions.items()}
        self.sources = {
            domain: PromptSource(part, seed, shuffle, multiple) for domain, part in parts.items()
        }

    @property
    def domains(self) -> Collection[str | None]:
        """Domains of the prompts."""
        return self.sources.keys()

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Draw]:
        """Take the next `n` prompts of a domain, all different; see `PromptSource.draw`."""
        return self.sources[domain].draw(n, self._of(besides, domain))

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        """Number of prompts of a domain besides those with these uids."""
        return len(self.sources[domain]) - len(self._of(besides, domain))

    def _of(self, uids: Collection[str], domain: str | None) -> list[str]:
        return [uid for uid in uids if uid in self.sources[domain]]

    def state_dict(self) -> dict[str, Any]:
        """The position in each domain."""
        return {"domains": [(d, s.state_dict()) for d, s in self.sources.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position in each domain."""
        saved = dict(state["domains"]) if "domains" in state else {None: state}
        if saved.keys() != self.sources.keys():
            raise UsageError(
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


def check_streams(has_domains: bool) -> None:
    """Refuse a schedule that needs to know all training prompts."""
    if has_domains:
        raise UsageError(
            "`TailBatching(per_domain=...)` draws from each domain, and `train_data` is a stream, "
            "whose prompts are not known before they are read. Leave `per_domain` out, or give a "
            "data set that is no stream."
        )


class RowStream:
    """Rows of a stream, none of which has been read."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    @property
    def column_sets(self) -> dict[tuple[str, ...], int]:
        """Columns of the first row, which is row 0."""
        return {tuple(row): 0 for row in each(self.rows.take(1), lambda _: "The stream, row 0")}


class StreamSource:
    """A cursor over a stream of rows, with the methods of `DomainSource`.

    A resumed run reads the pass again up to its position, so its next prompts are exactly those of
    a run that was not stopped. It refuses a stream that begins with other rows.
    """

    domains: Collection[str | None] = (None,)

    def __init__(
        self,
        stream: Any,
        tokenize: Callable[[Row], list[int]],
        check: Callable[[str, Mapping[str, Any]], None],
        *,
        max_prompt_length: int,
        seed: int,
        shuffle: bool,
        has_objects: bool = False,
        multiple: int = 1,
    ) -> None:
        self._multiple = multiple
        self._stream = stream
        self._tokenize = tokenize
        self._check = check
        self.max_prompt_length = max_prompt_length
        self.seed = seed
        self.shuffle = shuffle
        self.has_objects = has_objects
        self._deferred: list[Draw] = []
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        """Number of the pass that the next prompt comes from."""
        self.offset = 0
        """Rows read in this pass."""
        self._uids = hashlib.blake2b(digest_size=8)
        self._found = Counter[str]()
        self._rows: Iterator[Row] | None = None
        self._left_out = 0

    def _next(self) -> tuple[str, Row] | None:
        """Read the next row of the pass; `None` at its end."""
        if self._rows is None:
            stream = self._stream
            if self.shuffle:
                stream = stream.shuffle(seed=self.seed, buffer_size=BUFFER)
            stream.set_epoch(self.epoch)
            self._rows = self._whole_blocks(each(stream, self._at))
        if (row := next(self._rows, None)) is None:
            return None
        with located(partial(self._at, self.offset)):
            row = check_row(row, self.offset, self._at)
        uid = row_uid(row, self.offset)
        if not self.has_objects:
            check_prompt(columns_of(row), self._at(self.offset))
        elif row.get("uid") is None:  # equal rows are different tasks
            earlier = self._found[uid]
            self._found[uid] += 1
            uid += f"-{earlier}" if earlier else ""
        self.offset += 1
        self._uids.update(uid.encode() + b"\x1f")
        return uid, row

    def _whole_blocks(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield rows, but not those at the end of a pass that are too few for a round."""
        while len(block := [*islice(rows, self._multiple)]) == self._multiple:
            yield from block
        self._left_out = len(block)

    def _at(self, number: int) -> str:
        return f"The stream, row {number} of pass {self.epoch} (the first is 0)"

    def _prompt(self, uid: str, row: Row) -> Prompt:
        at = self._at(self.offset - 1)
        with located(lambda: at):
            plain = is_json(row) and json.dumps(row)
        if not plain:
            raise UsageError(
                f"{at} has values that JSON cannot hold, so that no checkpoint could keep the row. "
                "Convert them (`stream.map(...)`) or remove their column."
            )
        columns = other_columns(row)
        try:
            self._check(uid, columns)
        except ValueError as error:
            raise UsageError(f"{at}: {error}") from None
        try:
            token_ids = self._tokenize(row)
        except Exception as error:
            raise UsageError(f"{at} (uid {uid}) cannot be tokenised: {error}") from error
        if not 0 < len(token_ids) <= self.max_prompt_length:
            raise UsageError(
                f"{at} (uid {uid}) has a prompt of {len(token_ids)} tokens. A prompt of a stream "
                f"may have 1 to {self.max_prompt_length}: the smaller of `micro_batch_tokens` and "
                "the model's context, less `max_completion_length`. Prompts are never cut: leave "
                "the row out (`stream.filter(...)`), or make room."
            )
        return Prompt(uid, prompt_of(row), tuple(token_ids), columns)

    def first(self, number: int) -> list[Prompt]:
        """Return the first prompts of the first pass; the position stays where it is."""
        peek = copy(self)
        peek.shuffle, peek._multiple = False, 1
        peek._begin(0)
        rows = (peek._next() for _ in range(number))
        return [peek._prompt(*row) for row in rows if row is not None]

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Draw]:
        """Take the next `n` prompts, all different."""
        drawn: list[Draw] = []
        taken, waiting, self._deferred = {*besides}, iter(self._deferred), []
        ends = 0  # of passes, since a prompt was drawn
        while len(drawn) < n:
            if (draw := next(waiting, None)) is None and (found := self._next()) is not None:
                draw = Draw(self._prompt(*found), self.epoch)
            if draw is None:
                ends += 1
                if ends == 2 or not self.offset:
                    rows = self.offset + self._left_out
                    raise UsageError(
                        f"`prompts_per_round={n + len(besides)}`: a round draws each prompt at "
                        f"most once, and a pass over the stream has {rows} rows. Use {rows} or "
                        "less, or a larger data set."
                    )
                self._begin(self.epoch + 1)
            elif draw.prompt.uid in taken:
                self._deferred.append(draw)
            else:
                drawn.append(draw)
                taken.add(draw.prompt.uid)
                ends = 0
        self._deferred += waiting
        return drawn

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        """Number of prompts besides those with these uids: unknown, so the largest number."""
        return sys.maxsize

    def state_dict(self) -> dict[str, Any]:
        """The position, the skipped prompts, and a fingerprint of the rows of this pass."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "deferred": [(_packed(draw.prompt), draw.epoch) for draw in self._deferred],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": f"a stream, {self._uids.hexdigest()}",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position by reading the pass up to it."""
        fix = "Resume with the same data, or start a new run from the weights alone."
        if not str(state.get("fingerprint")).startswith("a stream, "):
            raise UsageError(
                f"The checkpoint was made with a data set, and `train_data` is a stream. {fix}"
            )
        check_same_order(state, self.seed, self.shuffle)
        self._begin(int(state["epoch"]))
        for _ in range(int(state["offset"])):
            if self._next() is None:
                break
        if self.state_dict()["fingerprint"] != state["fingerprint"]:
            raise UsageError(
                f"The checkpoint was made with another stream ({state['fingerprint']}) than this "
                f"one ({self.state_dict()['fingerprint']}). {fix}"
            )
        self._deferred = [
            Draw(_unpacked(*packed), int(epoch)) for packed, epoch in state["deferred"]
        ]

    def pack(self, groups: Iterable[Group]) -> list[PackedPrompt]:
        """Return the groups' prompts for a checkpoint, as a stream cannot give them again."""
        return [_packed(prompt) for prompt in {g.prompt.uid: g.prompt for g in groups}.values()]

    def unpack(self, packed: Iterable[PackedPrompt]) -> dict[str, Prompt]:
        """Return the prompts that `pack` stored, by uid."""
        return {entry[0]: _unpacked(*entry) for entry in packed}


def _packed(prompt: Prompt) -> PackedPrompt:
    text, columns = json.dumps(prompt.text), json.dumps(prompt.columns)
    return prompt.uid, text, list(prompt.token_ids), columns


def _unpacked(uid: str, text: str, token_ids: Iterable[int], columns: str) -> Prompt:
    return Prompt(uid, json.loads(text), tuple(token_ids), json.loads(columns))
