"""Lightning callbacks: each switches a schedule on, or shows what happens.

A callback that schedules sets one field of `Schedule` in `apply`, before the engine starts. Hooks
come in this order: `on_round_start`, `on_completion_end`, `on_group_end`, `on_round_end`
(`rollout_callback.py`). Callbacks that show what happens write logs, tables, a bar and a report.

Imports `types`, `settings`, `text`, `scheduling`, `training`, `simulation`, `run`.
"""

from lit_rlsched.callbacks.completion_writer import CompletionWriter
from lit_rlsched.callbacks.down_sampling import DownSampling
from lit_rlsched.callbacks.dynamic_sampling import DynamicSampling
from lit_rlsched.callbacks.infinite_sampling import LengthPrediction, MicroGroupSampling
from lit_rlsched.callbacks.prompt_choice import PromptBudget, PromptChoice
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.callbacks.rollout_logger import RolloutLogger
from lit_rlsched.callbacks.rollout_progress_bar import RolloutProgressBar
from lit_rlsched.callbacks.rollout_window import AsyncRollout, RolloutWindow
from lit_rlsched.callbacks.rollpacker import (
    AdaptiveTimeouts,
    ParallelismPlanner,
    StreamedTraining,
    TailBatching,
)
from lit_rlsched.callbacks.round_checkpoint import RNGState, RoundCheckpoint
from lit_rlsched.callbacks.sorted_batching import SortedBatching

__all__ = [
    "AdaptiveTimeouts",
    "AsyncRollout",
    "CompletionWriter",
    "DownSampling",
    "DynamicSampling",
    "LengthPrediction",
    "MicroGroupSampling",
    "ParallelismPlanner",
    "PromptBudget",
    "PromptChoice",
    "RNGState",
    "RolloutCallback",
    "RolloutLogger",
    "RolloutProgressBar",
    "RolloutWindow",
    "RoundCheckpoint",
    "SortedBatching",
    "StreamedTraining",
    "TailBatching",
]
