"""The task `Lookup`, with calls that take seconds."""

import asyncio
import random
import time
from typing import Any

from examples.lookup.lookup import Lookup, Registry
from lit_rlsched.types import stable_hash

MODEL = "examples/lookup/model"
PROMPTS, GENERATIONS, SLOTS, LIMIT = 16, 8, 32, 96
SIGMA = 0.5
"""Of the logarithm of a call's seconds."""


def rows(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of some rounds."""
    return Lookup("train", PROMPTS * rounds).rows()


class Slow(Registry):
    """A registry whose answers take time: log-normal, and the same in each run.

    Attributes:
        median: Median of the seconds of a call.
    """

    median = 0.0

    def reset(self, **row: Any) -> None:
        """Begin with the chain of a row."""
        super().reset(**row)
        self._row, self._calls = row["prompt"][0]["content"], 0

    def get(self, key: str) -> str:
        """Get what is stored under a key.

        Args:
            key: The key, a letter.
        """
        time.sleep(self._seconds())
        return super().get(key)

    def _seconds(self) -> float:
        self._calls += 1
        rng = random.Random(stable_hash(self._row, self._calls))
        return self.median * rng.lognormvariate(0, SIGMA)


def environment(median: float, waits: bool = False) -> type:
    """Return a class whose calls take a median of seconds.

    Args:
        median: Median of the seconds of a call.
        waits: Whether calls are `async`.
    """

    class Environment(Slow):
        async def get(self, key: str) -> str:
            """Get what is stored under a key.

            Args:
                key: The key, a letter.
            """
            await asyncio.sleep(self._seconds())
            return Registry.get(self, key)

    made = Environment if waits else type("Environment", (Slow,), {})
    made.median = median
    return made
