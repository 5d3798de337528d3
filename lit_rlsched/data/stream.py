"""Prompts of a stream (`datasets.IterableDataset`): read, tokenised and checked when drawn."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from lit_rlsched.data.messages import columns_of, prompt_of
from lit_rlsched.data.reading import each, for_each
from lit_rlsched.data.row_table import Row, other_columns, row_uid
from lit_rlsched.data.rows import check_prompt, check_row, is_json
from lit_rlsched.data.source import Draw, check_same_order
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Group, Prompt

BUFFER = 1000
"""Rows among which a shuffled stream draws the next one: the default of `datasets`."""

PackedPrompt = tuple[str, str, list[int], str]


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

    A pass reads the stream from its beginning, with `shuffle` in the order of its shuffle buffer. A
    resumed run reads the pass again up to its position, so its next prompts are exactly those of a
    run that was not stopped. It refuses a stream that begins with other rows.
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
        (row,) = for_each(partial(check_row, at=self._at), [row], self._at, self.offset)
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
        (plain,) = for_each(lambda row, _: is_json(row) and json.dumps(row), [row], lambda _: at)
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
        args = (self._stream, self._tokenize, self._check)
        limits: dict[str, Any] = {"max_prompt_length": self.max_prompt_length}
        peek = StreamSource(
            *args, **limits, seed=self.seed, shuffle=False, has_objects=self.has_objects
        )
        rows = (peek._next() for _ in range(number))
        return [peek._prompt(*row) for row in rows if row is not None]

    def draw(self, n: int, besides: Collection[str] = (), domain: str | None = None) -> list[Draw]:
        """Take the next `n` prompts, all different."""
        drawn: list[Draw] = []
        taken, waiting = {*besides}, self._deferred
        self._deferred = []
        ends = 0

        def take(draw: Draw) -> bool:
            fits = len(drawn) < n and draw.prompt.uid not in taken
            (drawn if fits else self._deferred).append(draw)
            if fits:
                taken.add(draw.prompt.uid)
            return fits

        for draw in waiting:
            take(draw)
        while len(drawn) < n:
            if (found := self._next()) is not None:
                if take(Draw(self._prompt(*found), self.epoch)):
                    ends = 0
                continue
            ends += 1
            if ends == 2 or not self.offset:
                rows = self.offset + self._left_out
                raise UsageError(
                    f"`prompts_per_round={n + len(besides)}`: a round draws each prompt at most "
                    f"once, and a pass over the stream has {rows} rows. Use {rows} or less, or a "
                    "larger data set."
                )
            self._begin(self.epoch + 1)
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
