"""Reward functions, judges, and the scheduler that calls them."""

from typing import TYPE_CHECKING, Any

from lit_rlsched.rewards.endpoint_judge import JudgeReward
from lit_rlsched.rewards.jobs import ScoredJob
from lit_rlsched.rewards.scheduler import RewardScheduler

if TYPE_CHECKING:
    from lit_rlsched.rewards.engine_judge import EngineJudgeReward

__all__ = ["EngineJudgeReward", "JudgeReward", "RewardScheduler", "ScoredJob"]


def __getattr__(name: str) -> Any:
    """Import `EngineJudgeReward` on first use, as it imports torch, which workers avoid."""
    if name == "EngineJudgeReward":
        from lit_rlsched.rewards.engine_judge import EngineJudgeReward

        return EngineJudgeReward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
