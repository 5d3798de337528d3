"""Turns a drawn round into gradients: selection, advantages, log-probs, losses, micro-batches.

A round that is drawn is first selected from (`selection.py`) and gets its advantages
(`advantages.py`). `Update.step` makes an optimizer step of it, whose micro-batches are built one at
a time (`micro_batches.py`). A pass gives log-probs (`logprobs.py`) and a loss (`losses.py`).
Before the next rollout `WeightSync` copies the weights to the engine and checks that it decodes
with them. Tokens of older policies are verified by `draft_verifier.py`.

Imports `types`, `_lazy`, `settings`, `ranks`, `scheduling`, `engines`, `rewards`,
`data`, `environments`, `rollout`.
"""

from typing import TYPE_CHECKING

from lit_rlsched._lazy import lazy

if TYPE_CHECKING:
    from lit_rlsched.training.advantages import group_relative, leave_one_out
    from lit_rlsched.training.logprobs import completion_logprobs
    from lit_rlsched.training.losses import policy_loss
    from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
    from lit_rlsched.training.round import reward_matrix
    from lit_rlsched.training.weight_sync import WeightSync

__all__ = [
    "MicroBatch",
    "OptimizerStep",
    "WeightSync",
    "completion_logprobs",
    "group_relative",
    "leave_one_out",
    "policy_loss",
    "reward_matrix",
]

__getattr__ = lazy(
    __name__,
    {
        **dict.fromkeys(("MicroBatch", "OptimizerStep"), "micro_batches"),
        **dict.fromkeys(("group_relative", "leave_one_out"), "advantages"),
        "WeightSync": "weight_sync",
        "completion_logprobs": "logprobs",
        "policy_loss": "losses",
        "reward_matrix": "round",
    },
)
