"""Draft tokens: guesses of what a request draws next, which an engine verifies several at a time.

An engine draws every token with noise that belongs to the request and the token's position, so a
draft token is right if and only if it is that draw: drafts change the number of decode steps, never
a token (compare Leviathan et al., arXiv 2211.17192, whose drafts keep the distribution only).
"""

import warnings
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from lit_rlsched.scheduling.drafters import GroupIndex, Guess, ask, load_drafter
from lit_rlsched.settings import check_ranges
from lit_rlsched.types import Request

IDLE_TOKENS = 1 << 22
"""Maximum number of tokens kept of groups without a running request."""
POSITION_COST = {"cpu": 0.05, "cuda": 0.005}
"""Time that one more position adds to a decode step, over the time of a step with a single one.

On CPUs measured: .04 to .07 with 70 to 135 M parameters on two cores, .014 with 0.45 M. On GPUs not
measured: in the time that reads the weights, an H100 computes some 300 positions in bfloat16.
"""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The arguments of `Speculation`, which documents them."""

    tokens: int = 4
    """Maximum number of draft tokens of a request in a decode step."""
    while_running: int = 32
    """Nothing is drafted while more requests than this run in the engine."""
    drafter: str | None = None
    """Import path of the user's `Drafter` class; `None`: the built-in one."""

    def __post_init__(self) -> None:
        check_ranges("Speculation", asdict(self))
        if self.drafter is not None:
            load_drafter(self.drafter)


@dataclass(slots=True)
class DraftCounts:
    """What an engine has drafted since its start, in decode steps with at least one draft token."""

    steps: int = 0
    row_steps: int = 0
    """Running requests, summed over these steps."""
    proposed: int = 0
    """Draft tokens."""
    accepted: int = 0
    """Accepted draft tokens. The steps drew `row_steps + accepted` tokens."""
    failures: int = 0
    """Calls of the user's drafter that raised or returned something unusable."""


def agreeing(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return the number of draft tokens up to the first that is not the token drawn there."""
    pairs = zip(draft, drawn, strict=False)
    wrong = (i for i, (guess, token) in enumerate(pairs) if guess != token)
    return next(wrong, min(len(draft), len(drawn)))


@dataclass(slots=True)
class _Group:
    name: str
    index: GroupIndex
    texts: "dict[str, array[int]]" = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    unread: dict[str, None] = field(default_factory=dict)  # texts not indexed to their end

    def __len__(self) -> int:
        return sum(map(len, self.texts.values()))


@dataclass(slots=True)
class _Row:
    group: _Group
    text: "array[int]"
    left: int
    """Tokens that it may still draw before it ends or pauses."""
    guesses: list[Guess] = field(default_factory=list)
    """What it may draw next, whether or not an engine verifies it."""


class _Rates:
    """How often guesses were right, by their evidence: counted for all, verified or not.

    A kind of evidence that is new counts as right in one of two.
    """

    def __init__(self, cost: float) -> None:
        self._cost = cost
        self._right: Counter[Hashable] = Counter()
        self._judged: Counter[Hashable] = Counter()

    def judge(self, guesses: Sequence[Guess], drawn: Sequence[int]) -> None:
        """Compare guesses with what was drawn in their place, up to the first wrong one."""
        for guess, token in zip(guesses, drawn, strict=False):
            self._judged[guess.evidence] += 1
            if guess.token != token:
                break
            self._right[guess.evidence] += 1

    def worthwhile(self, guesses: Sequence[Guess], running: int) -> list[int]:
        """Return the guesses that save more time than they cost.

        A right one saves a position and its row's share of a step; each costs a position.
        """
        least = self._cost / (1 / running + self._cost)
        tokens, right = list[int](), 1.0
        for guess in guesses:
            right *= (self._right[guess.evidence] + 1) / (self._judged[guess.evidence] + 2)
            if right < least:
                break
            tokens.append(guess.token)
        return tokens

    def clear(self) -> None:
        """Forget everything."""
        self._right.clear()
        self._judged.clear()


class DraftTokens:
    """The texts that an engine knows, and the draft tokens that follow from them.

    Texts of a group stay while one of its requests runs. After that they stay until `forget`, as
    further requests of the group may wait. Beyond `IDLE_TOKENS`, the texts that were idle for
    longest are dropped. Groups use what others have learned until no request runs.
    """

    def __init__(
        self, settings: Drafting, vocab_size: int | None = None, device: str = "cpu"
    ) -> None:
        self.settings, self.counts = settings, DraftCounts()
        self._vocab_size = vocab_size
        self._drafter = None if settings.drafter is None else load_drafter(settings.drafter)
        self._rows: dict[str, _Row] = {}
        self._busy: dict[str, _Group] = {}
        self._idle: dict[str, _Group] = {}
        self._idle_tokens = 0
        self._votes: dict[int, int] = {}
        self._rates = _Rates(POSITION_COST.get(device, POSITION_COST["cpu"]))

    def __len__(self) -> int:
        """Number of tokens that it keeps."""
        return self._idle_tokens + sum(map(len, self._busy.values()))

    def begin(self, request: Request) -> None:
        """Note that a request runs, for the first time or after a pause."""
        name, group, prefix = request.id, request.group, request.prefix_ids
        if (found := self._busy.get(group)) is None:
            known = _Group(group, GroupIndex(self._votes))
            found = self._busy[group] = self._idle.pop(group, known)
            self._idle_tokens -= len(found)
        text = array("i", [*request.prompt_ids, *prefix])
        self._rows[name] = _Row(found, text, request.limit - len(prefix))
        before = found.texts.get(name)
        if before is not None and text[: len(before)] != before:
            found.index.forget(name)  # it is drawn again
        found.texts[name] = text
        found.unread[name] = None
        found.running.add(name)

    def take(self, name: str, tokens: Sequence[int]) -> None:
        """Note the tokens that a request has drawn in a step; none of an unknown request."""
        if (row := self._rows.get(name)) is not None:
            self._rates.judge(row.guesses, tokens)
            row.guesses = []
            row.text.extend(tokens)
            row.group.unread[name] = None
            row.left -= len(tokens)
            self.counts.accepted += len(tokens) - 1

    def leave(self, name: str) -> None:
        """Note that a request has ended, paused or been aborted; unknown ones are ignored."""
        if (row := self._rows.pop(name, None)) is None:
            return
        group = row.group
        group.running.discard(name)
        if not group.running:
            group.index = GroupIndex(self._votes)  # many times the memory of the texts
            group.unread = dict.fromkeys(group.texts)
            self._idle[group.name] = self._busy.pop(group.name)
            self._idle_tokens += len(group)
            while self._idle_tokens > IDLE_TOKENS:
                self._idle_tokens -= len(self._idle.pop(next(iter(self._idle))))
        if not self._busy:  # so that each rollout takes the same steps in a resumed run
            self._votes.clear()
            self._rates.clear()

    def draft_all(self) -> None:
        """Draft all guesses from now on: the most that a step may have."""
        self._rates = _Rates(0.0)

    def forget(self) -> None:
        """Drop the texts of groups without a running request, as after the end of a rollout."""
        self._idle, self._idle_tokens = {}, 0

    def propose(self, running: Sequence[str]) -> dict[str, list[int]]:
        """Return the draft tokens of the next step; requests without any are left out."""
        drafts: dict[str, list[int]] = {}
        if len(running) > self.settings.while_running:
            return drafts
        for name in running:
            if row := self._rows.get(name):
                # a step draws one more token, which may be the last one before a pause
                most = min(self.settings.tokens, row.left - 1)
                if most > 0:
                    row.guesses = self._guess(name, row, most)
                    if draft := self._rates.worthwhile(row.guesses, len(running)):
                        drafts[name] = draft
        if drafts:
            self.counts.steps += 1
            self.counts.row_steps += len(running)
            self.counts.proposed += sum(map(len, drafts.values()))
        return drafts

    def _guess(self, name: str, row: _Row, most: int) -> list[Guess]:
        texts, index = row.group.texts, row.group.index
        if self._drafter is None:
            for other in row.group.unread:
                index.learn(other, texts[other])
            row.group.unread.clear()
            return index.propose(row.text, most)
        siblings = [text for other, text in texts.items() if other != name]
        try:
            tokens = ask(self._drafter, row.text, siblings, most, self._vocab_size)
            return [Guess(token, place) for place, token in enumerate(tokens)]
        except Exception as error:  # whatever the user's code may do, decoding goes on
            if self.counts.failures == 0:
                warnings.warn(
                    f"`Speculation(drafter={self.settings.drafter!r})` failed and drafts nothing "
                    f"for this step ({type(error).__name__}: {error}). Further failures are only "
                    "counted (`speculation/drafter_failures`).",
                    stacklevel=2,
                )
            self.counts.failures += 1
            return []
