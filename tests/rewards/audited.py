"""`reasoning_gym_reward`, which tells what the interpreter was made to do while it scored."""

import sys
from collections.abc import Callable
from typing import Any

from lit_rlsched.rewards.functions import import_reasoning_gym, reasoning_gym_reward

EVENTS: list[str] = []
PLAIN = {"object.__getattr__", "object.__setattr__", "sys._getframe", "builtins.id"}
"""What the interpreter tells of any code that looks at objects."""


def hear(event: str, arguments: Any) -> None:
    if event not in PLAIN:
        EVENTS.append(f"{event} {arguments!r:.200}")


class Audited:
    """Logs every audit event of its calls but the first of each data set, which loads the data."""

    __name__ = "audited"

    def __init__(self, reward: Callable[..., list[float]] = reasoning_gym_reward) -> None:
        self.reward = reward
        self.seen: set[str] = set()

    def warm_up(self) -> None:
        import_reasoning_gym()
        sys.addaudithook(hear)

    def __call__(self, completions: Any, *, log_extra: Any, **columns: Any) -> Any:
        EVENTS.clear()
        try:
            return self.reward(completions, **columns)
        finally:
            (task,) = columns.get("task", [""])
            if task in self.seen:
                log_extra("events", [list(EVENTS)])
            self.seen.add(task)


def evaluates(completions: list[str], **kwargs: Any) -> list[float]:
    """What must be seen: a reward that evaluates the completion."""
    return [float(eval(completions[0]))]


class AuditedEval(Audited):
    """The same around a reward that evaluates."""

    def __call__(self, completions: Any, *, log_extra: Any, **columns: Any) -> Any:
        EVENTS.clear()
        try:
            return evaluates(completions)
        finally:
            log_extra("events", [list(EVENTS)])
