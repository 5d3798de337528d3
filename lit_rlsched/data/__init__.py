"""Turns rows of data sets and tasks into tokenised prompts, and draws them in order.

Rows come from files, data sets of the hub, lists or tasks (`rows.py`), and get a uid each. Prompts
are tokenised once, at the start (`prompts.py`, `tokenizing.py`). A source draws them in an order
that seed and epoch decide (`source.py`), and a prompt becomes a group of completions
(`repetition.py`).

Imports `types`, `_lazy`, `settings`, `text`, `scheduling`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy

if TYPE_CHECKING:
    from lit_rlsched.data.prompts import make_prompts
    from lit_rlsched.data.repetition import repeat
    from lit_rlsched.data.source import PromptSource
    from lit_rlsched.data.tasks import Countdown

__all__ = ["Countdown", "PromptSource", "make_prompts", "repeat"]

__getattr__ = lazy(
    __name__,
    {
        "Countdown": "tasks",
        "PromptSource": "source",
        "make_prompts": "prompts",
        "repeat": "repetition",
    },
)
