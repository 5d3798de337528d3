"""Lightning's callback with the hooks of a rollout."""

from typing import TYPE_CHECKING, ClassVar

from lightning import LightningModule, Trainer
from lightning.pytorch import Callback

from lit_rlsched.types import Completion, Group

if TYPE_CHECKING:
    from lit_rlsched.training.round import Round


class RolloutCallback(Callback):
    """A callback that also sees rounds; override what you need.

    Each hook fires exactly once for each round, completion and group of training, whether the run
    was resumed or not. Validation rollouts fire none. A callback that sets something of the data
    module names it in `sets`; two that set the same are refused.

    Example::

        class Longest(RolloutCallback):
            def on_round_end(self, trainer, pl_module, round):
                print(max(len(c.token_ids) for c in round.completions))
    """

    sets: ClassVar[str | None] = None

    def on_round_start(
        self, trainer: Trainer, pl_module: LightningModule, plan: list[Group]
    ) -> None:
        """Before anything of the round is drawn; `plan` holds its groups."""

    def on_completion_end(
        self, trainer: Trainer, pl_module: LightningModule, completion: Completion
    ) -> None:
        """A completion is finished and scored; with `SortedBatching` it may yet be drawn anew."""

    def on_group_end(self, trainer: Trainer, pl_module: LightningModule, group: Group) -> None:
        """All completions of a prompt are finished and scored."""

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: "Round") -> None:
        """All of the round is drawn and has its advantages; nothing of it was trained on yet."""
