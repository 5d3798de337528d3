"""Draws one round: plans its groups, decodes and scores them, and splits off those to train on.

`Pool.plan` takes groups from the pool and from the data. `Rollout` draws them: it verifies what
older policies have drawn, loads the weights, submits requests, turns events into completions, and
has them scored while others decode. The rule ends the round. `RoundResult` says who is trained on;
`Pool.commit` keeps the others. A session has what lasts: engine, scorer, tools.

Imports `types`, `_lazy`, `settings`, `text`, `scheduling`, `engines`, `rewards`,
`data`, `environments`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy

if TYPE_CHECKING:
    from lit_rlsched.rollout.rollout import Rollout
    from lit_rlsched.rollout.scoring import Scorer
    from lit_rlsched.rollout.session import RolloutSession

__all__ = ["Rollout", "RolloutSession", "Scorer"]

__getattr__ = lazy(
    __name__, {"Rollout": "rollout", "RolloutSession": "session", "Scorer": "scoring"}
)
