"""How reward functions fail, and how often each has."""

import logging
import math
from collections import Counter
from collections.abc import Sequence

logger = logging.getLogger(__name__)

FAILURE_KINDS = {
    "raised": "raised",
    "timeout": "timeouts",
    "crashed": "crashes",
    "out_of_memory": "out_of_memory",
    "bad_return": "bad_returns",
    "no_answer": "no_answers",
    "unparsed": "unparsed",
}
"""First word of a failure -> last part of its counter."""
JUDGES_ONLY = ("no_answer", "unparsed")
"""Counted for functions that say so themselves, with `log_failure`."""


def kind_of(failure: str) -> str:
    """The first word."""
    return failure.partition(":")[0]


class FailureCounts:
    """Counts failures, and logs the 1st, 10th, 100th ... of each kind: a log, not a flood.

    Args:
        names: Of the reward functions.
        names_failures: Whether each says itself why it gives no score.
    """

    def __init__(self, names: Sequence[str], names_failures: Sequence[bool]) -> None:
        self._names = names
        self._names_failures = names_failures
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, failure: str) -> None:
        """One more completion without a score."""
        kind = kind_of(failure)
        self._counts[name, kind] += 1
        count = self._counts[name, kind]
        if math.log10(count).is_integer():
            logger.warning(
                "reward function `%s` gave no score for a completion: %s [%s no. %d]",
                *(name, failure, FAILURE_KINDS[kind], count),
            )

    def by_counter(self) -> dict[str, int]:
        """All that there may be, as `rewards/<function>/<kind>`."""
        return {
            f"rewards/{name}/{plural}": self._counts[name, kind]
            for name, judges in zip(self._names, self._names_failures, strict=True)
            for kind, plural in FAILURE_KINDS.items()
            if judges or kind not in JUDGES_ONLY
        }
