"""Score completions: reward functions in processes that may crash, and judges.

Imports `types`, `_lazy`, `settings`, `text`, `processes`, `engines`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy
from lit_rlsched.rewards.endpoint_judge import JudgeReward
from lit_rlsched.rewards.jobs import ScoredJob
from lit_rlsched.rewards.scheduler import RewardScheduler

if TYPE_CHECKING:
    from lit_rlsched.rewards.engine_judge import EngineJudgeReward
    from lit_rlsched.rewards.functions import countdown_reward

__all__ = ["EngineJudgeReward", "JudgeReward", "RewardScheduler", "ScoredJob", "countdown_reward"]

# workers avoid torch, which `EngineJudgeReward` imports
__getattr__ = lazy(__name__, {"EngineJudgeReward": "engine_judge", "countdown_reward": "functions"})
