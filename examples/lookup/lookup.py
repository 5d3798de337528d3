"""A task that no model solves without its tool: chains of keys.

    lit-rlsched fit -c configs/lookup.yaml

The prompt names the first key of a chain. `get` returns the next key, or the number at the end,
which is the answer. Chains are random, so nothing but calls tells what comes next.
"""

import random

from lit_rlsched.data.tasks import PromptTask
from lit_rlsched.types import stable_hash

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 4
"""Most keys of a chain."""


class Lookup(PromptTask):
    """Chains of 1 to 4 keys, each with a number at its end.

    Args:
        split: `heldout` or `train`; they have no chain in common.
        size: Number of prompts.
    """

    def __init__(self, split: str = "train", size: int = 2000) -> None:
        self.split = split
        self.size = size

    def rows(self):
        """Return a row per chain: `prompt`, and the columns `chain` and `answer`."""
        first = 0 if self.split == "train" else 5000  # two halves of the numbers of four digits
        return [row_of(number) for number in range(first, first + self.size)]


def row_of(number):
    """Return the row of a chain by its number, from 0 to 9999."""
    rng = random.Random(stable_hash("lookup", number))
    chain = rng.sample(LETTERS, rng.randint(1, LONGEST))
    chat = [{"role": "user", "content": f"{number:04}: {chain[0]}"}]
    return {"prompt": chat, "chain": chain, "answer": str(rng.randint(10, 99))}


class Registry:
    """The environment of a completion: what its tool has to read from."""

    def reset(self, chain, answer, **row) -> None:
        """Begin with the chain of a row."""
        self.entries = dict(zip(chain, [*chain[1:], answer], strict=True))

    def get(self, key: str) -> str:
        """Get what is stored under a key.

        Args:
            key: The key, a letter.
        """
        return self.entries.get(key, "none")


def right(completions, answer, **row):
    """Return 1 for completions whose last turn is the answer, else 0."""
    turns = [completion[-1]["content"] for completion in completions]
    return [float(turn == each) for turn, each in zip(turns, answer, strict=True)]
