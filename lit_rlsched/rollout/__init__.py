"""Draws one round: plans its groups, decodes and scores them, and settles who is trained on.

Imports `types`, `_lazy`, `settings`, `text`, `scheduling`, `engines`, `rewards`,
`data`, `environments`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy

if TYPE_CHECKING:
    from lit_rlsched.rollout.scoring import Scorer
    from lit_rlsched.rollout.session import RolloutSession

__all__ = ["RolloutSession", "Scorer"]

__getattr__ = lazy(__name__, {"RolloutSession": "session", "Scorer": "scoring"})
