"""Scheduled rollouts for reinforcement-learning post-training inside the Lightning Trainer."""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy

if TYPE_CHECKING:
    from lit_rlsched.datamodule import RolloutDataModule
    from lit_rlsched.module import GRPOModule, RLOOModule
    from lit_rlsched.run.saving.export import export
    from lit_rlsched.training.policy import eos_token_ids, load_policy, load_tokenizer
    from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

__all__ = [
    "Completion",
    "GRPOModule",
    "Group",
    "Prompt",
    "RLOOModule",
    "RolloutDataModule",
    "Sample",
    "Sampling",
    "__version__",
    "eos_token_ids",
    "export",
    "load_policy",
    "load_tokenizer",
]
__version__ = "0.1.0"

__getattr__ = lazy(
    __name__,
    {
        **dict.fromkeys(("GRPOModule", "RLOOModule"), "module"),
        "RolloutDataModule": "datamodule",
        "export": "run.saving.export",
        **dict.fromkeys(("eos_token_ids", "load_policy", "load_tokenizer"), "training.policy"),
        **dict.fromkeys(("Completion", "Group", "Prompt", "Sample", "Sampling"), "types"),
    },
)
