"""Where draft tokens come from: the texts of a rollout, or a class of the user's.

The built-in drafter is prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) over
all completions of a prompt. Where these have no match, it looks in the completions of other
prompts.
"""

from collections.abc import Hashable, Sequence
from importlib import import_module
from itertools import islice, pairwise
from operator import index
from typing import NamedTuple, Protocol

from lit_rlsched.settings import UsageError

ENDS = (6, 4, 2)
"""Numbers of tokens at the end of a text that are looked up, one after the other.

Looking up all from 8 to 2 saves 0.5 % of the decode steps on recorded texts, and takes twice as
long to learn.
"""
MOST_SEQUENCES = 1 << 20
"""Maximum number of sequences of all groups that are kept: 0.1 GB. Then they are learned anew."""
LEAD = 1 << 32
MOST_LEAD = 3
"""Longer leads count as this one where guesses are compared."""


class Drafter(Protocol):
    """A user's own drafter: one method, and a constructor without arguments."""

    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> Sequence[int]:
        """Guess what follows a text; called in the engine's process, for each row and step."""


def load_drafter(path: str) -> Drafter:
    """Import a drafter's class and make one."""
    named = f"`Speculation(drafter={path!r})`"
    module, _, name = str(path).rpartition(".")
    try:
        drafter: Drafter = getattr(import_module(module), name)()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{named} cannot be made ({why}). Use the import path of a class whose constructor "
            "needs no arguments, such as 'my_package.my_module.MyDrafter'."
        ) from error
    if not callable(getattr(drafter, "propose", None)):
        raise UsageError(f"{named} has no method `propose(text, siblings, most)`. Add it.")
    return drafter


def ask(
    drafter: Drafter,
    text: Sequence[int],
    siblings: Sequence[Sequence[int]],
    most: int,
    vocab_size: int | None,
) -> list[int]:
    """Ask a drafter of the user's, and check what it returns."""
    proposed = drafter.propose(text, siblings, most)
    draft = [index(token) for token in islice(proposed, most + 1)]  # it may be endless
    if len(draft) > most:
        raise UsageError(f"`propose` returned more than most={most} tokens")
    for token in draft:
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            raise UsageError(f"`propose` returned {token}, which is not in the vocabulary")
    return draft


class Guess(NamedTuple):
    """A token that may come next."""

    token: int
    evidence: Hashable
    """What it rests on. Guesses with the same evidence are about as often right."""


class GroupIndex:
    """Knows what mostly followed each sequence of 6, 4 or 2 tokens, in a group's and in all texts.

    Learning a text continues where it stopped, so each text is read once. Majorities are kept by
    the vote of Boyer and Moore ("MJRTY", 1981), one number per sequence: on recorded texts drafts
    are as often right as with all counts.
    """

    def __init__(self, of_all: "dict[int, int] | None" = None) -> None:
        # hash of a sequence -> the token that leads, plus LEAD times its lead
        self._votes: dict[int, int] = {}
        self._of_all = {} if of_all is None else of_all
        self._learned: dict[str, int] = {}
        self._first: Sequence[int] = ()

    def learn(self, name: str, text: Sequence[int]) -> None:
        """Learn the tokens that a text has got since the last call with this `name`."""
        start = self._learned.get(name)
        if start == len(text):
            return
        if start is None:  # the prompt is learned once for all texts
            start = _common(self._first, text)
            self._first = self._first or text
        if len(self._of_all) > MOST_SEQUENCES:
            self._of_all.clear()
        both = self._votes, self._of_all
        begin = max(start, ENDS[-1])
        pairs = _pairs(text[max(0, begin - ENDS[0]) : len(text) - 1])
        first = len(pairs) - (len(text) - begin)
        for i in range(first, len(pairs)):  # hot loop: once for each token that is drawn
            token = text[begin - first + i]
            for key in _keys(pairs, i):
                for votes in both:
                    vote = votes.get(key, token)
                    if vote % LEAD == token:
                        votes[key] = vote + LEAD
                    else:
                        votes[key] = vote - LEAD if vote >= LEAD else token + LEAD
        self._learned[name] = len(text)

    def forget(self, name: str) -> None:
        """Learn the text of this `name` from its start the next time."""
        self._learned.pop(name, None)

    def propose(self, text: Sequence[int], most: int) -> list[Guess]:
        """Return at most `most` tokens; each is the one that mostly followed the longest known end.

        If an end is known in the group and in all texts, the group decides.
        """
        pairs = _pairs(text[-ENDS[0] :])
        guesses: list[Guess] = []
        if not pairs:
            return guesses
        last, votes, of_all = text[-1], self._votes, self._of_all
        while len(guesses) < most:
            keys = _keys(pairs, len(pairs) - 1)
            known = (i for i, key in enumerate(keys) if key in votes or key in of_all)
            if (at := next(known, None)) is None:
                break
            own = keys[at] in votes
            lead, token = divmod((votes if own else of_all)[keys[at]], LEAD)
            guesses.append(Guess(token, (len(keys) - at, own, min(lead, MOST_LEAD))))
            pairs.append(hash((last, token)))
            last = token
        return guesses


def _pairs(text: Sequence[int]) -> list[int]:
    """Hashes of a text's neighbouring tokens; `_keys` combines them."""
    return [hash(pair) for pair in pairwise(text)]


def _keys(pairs: Sequence[int], at: int) -> tuple[int, ...]:
    """Keys of the ends of a text, of `ENDS` tokens each, whose last pair is that at `at`."""
    if at >= 4:
        a, b, c = pairs[at - 4], pairs[at - 2], pairs[at]
        return hash((a, b, c)), hash((b, c)), c
    if at >= 2:
        return hash((pairs[at - 2], pairs[at])), pairs[at]
    return (pairs[at],)


def _common(first: Sequence[int], text: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(text)))
