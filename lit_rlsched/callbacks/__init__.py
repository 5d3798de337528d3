"""Lightning callbacks: each switches a schedule on, or shows what happens.

Imports `types`, `settings`, `text`, `scheduling`, `training`, `simulation`, `run`.
"""

from lit_rlsched.callbacks.adaptive_timeouts import AdaptiveTimeouts
from lit_rlsched.callbacks.async_rollout import AsyncRollout
from lit_rlsched.callbacks.completion_writer import CompletionWriter
from lit_rlsched.callbacks.down_sampling import DownSampling
from lit_rlsched.callbacks.dynamic_sampling import DynamicSampling
from lit_rlsched.callbacks.export_model import ExportModel
from lit_rlsched.callbacks.length_prediction import LengthPrediction
from lit_rlsched.callbacks.micro_group_sampling import MicroGroupSampling
from lit_rlsched.callbacks.parallelism_planner import ParallelismPlanner
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.callbacks.rollout_logger import RolloutLogger
from lit_rlsched.callbacks.rollout_progress_bar import RolloutProgressBar
from lit_rlsched.callbacks.rollout_window import RolloutWindow
from lit_rlsched.callbacks.round_checkpoint import RNGState, RoundCheckpoint
from lit_rlsched.callbacks.sorted_batching import SortedBatching
from lit_rlsched.callbacks.speculation import Speculation
from lit_rlsched.callbacks.streamed_training import StreamedTraining
from lit_rlsched.callbacks.tail_batching import TailBatching
from lit_rlsched.callbacks.timeline import Timeline
from lit_rlsched.run.automatic import MicroBatchAccumulation

__all__ = [
    "AdaptiveTimeouts",
    "AsyncRollout",
    "CompletionWriter",
    "DownSampling",
    "DynamicSampling",
    "ExportModel",
    "LengthPrediction",
    "MicroBatchAccumulation",
    "MicroGroupSampling",
    "ParallelismPlanner",
    "RNGState",
    "RolloutCallback",
    "RolloutLogger",
    "RolloutProgressBar",
    "RolloutWindow",
    "RoundCheckpoint",
    "SortedBatching",
    "Speculation",
    "StreamedTraining",
    "TailBatching",
    "Timeline",
]
