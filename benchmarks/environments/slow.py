"""The task `Lookup`, with calls that take seconds."""

import asyncio
import random
import time
from typing import Any

from examples.lookup.lookup import Lookup, Registry
from lit_rlsched.types import stable_hash

MODEL = "examples/lookup/model"
PROMPTS, GENERATIONS, SLOTS, LIMIT = 16, 8, 32, 96
CONTEXT, REPLY = 200, 6
"""Most tokens of a completion with turns of made-up lengths, and about those of a reply."""
SIGMA = 0.5
"""Of the logarithm of a call's seconds."""


def turns(row: str, index: int) -> list[int]:
    """Return made-up lengths of the turns of a completion: log-normal, and few to many turns.

    Args:
        row: Prompt of the completion.
        index: Its place in the group.
    """
    rng = random.Random(stable_hash("turns", row, index))
    lengths: list[int] = []
    for _ in range(min(16, 1 + int(rng.expovariate(1 / 4)))):
        length = max(3, round(12 * rng.lognormvariate(0, 0.7)))
        if sum(lengths) + length + REPLY * len(lengths) > CONTEXT:
            break
        lengths.append(length)
    return lengths or [12]


def rows(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of some rounds."""
    made: list[dict[str, Any]] = Lookup("train", PROMPTS * rounds).rows()  # type: ignore[no-untyped-call]
    return made


def environment(median: float, waits: bool = False) -> type:
    """Return a registry whose answers take time: log-normal, and the same in each run.

    Args:
        median: Median of the seconds of a call.
        waits: Whether calls are `async`.
    """

    class Timed:
        def reset(self, **row: Any) -> None:
            self._registry = Registry()
            self._registry.reset(**row)
            self._row, self._calls = row["prompt"][0]["content"], 0

        def _seconds(self) -> float:
            self._calls += 1
            rng = random.Random(stable_hash(self._row, self._calls))
            return median * rng.lognormvariate(0, SIGMA)

    class Sync(Timed):
        def get(self, key: str) -> str:
            """Get what is stored under a key.

            Args:
                key: The key, a letter.
            """
            time.sleep(self._seconds())
            return str(self._registry.get(key))

    class Async(Timed):
        async def get(self, key: str) -> str:
            """Get what is stored under a key.

            Args:
                key: The key, a letter.
            """
            await asyncio.sleep(self._seconds())
            return str(self._registry.get(key))

    return Async if waits else Sync
