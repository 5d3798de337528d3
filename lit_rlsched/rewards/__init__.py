"""Score completions: reward functions in processes that may crash, and judges.

`RewardScheduler` gets a completion once it is finished, calls each function in a worker, and
returns the scores with `poll`, in any order. A function that raises, hangs or dies gives no score,
which is counted by name. Judges ask another model over HTTP. Golds of
known data sets are read from their rows.

Imports `types`, `_lazy`, `settings`, `text`, `processes`, `workers`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy
from lit_rlsched.rewards.jobs import ScoredJob
from lit_rlsched.rewards.judge import JudgeReward
from lit_rlsched.rewards.scheduler import RewardScheduler

if TYPE_CHECKING:
    from lit_rlsched.rewards.functions import countdown_reward

__all__ = ["JudgeReward", "RewardScheduler", "ScoredJob", "countdown_reward"]

__getattr__ = lazy(__name__, {"countdown_reward": "functions"})
