"""Reward functions and their scheduler."""

from lit_rlsched.rewards.scheduler import RewardScheduler, ScoredJob

__all__ = ["RewardScheduler", "ScoredJob"]
