"""RollPacker's reward time-outs: as long as a correct completion needs, and not much longer."""

import math
from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.logs import log_now
from lit_rlsched.scheduling.adaptive_timeouts import AdaptiveTimeout
from lit_rlsched.training.round import Round


class AdaptiveTimeouts(RolloutCallback):
    """Kill a reward call that takes much longer than correct completions of its prompt have taken.

    RollPacker (arXiv 2509.21009, section 4.3): `T = min(max(minimum, scale * anchor), maximum)`
    for each call of each reward function. The anchor is the longest such a call has taken for a
    correct completion (first reward 1.0 or more) of the same prompt; before there is one, the limit
    is `maximum`, which takes the place of `reward_timeout`. What is killed gets no reward and is
    counted in `rewards/<func>/timeouts`, as ever; the paper gives it 0, which would teach that a
    slow machine is a wrong answer.

    Logs `reward_timeout/anchored`, the share of a round's prompts that have an anchor, and
    `reward_timeout/mean`, their seconds. Anchors are in the checkpoint.

    Args:
        scale: Multiple of the anchor.
        minimum: Seconds, at least so many: calls take longer on a busy machine.
        maximum: Seconds.

    Raises:
        ValueError: an argument is out of range.

    Example::

        Trainer(callbacks=[AdaptiveTimeouts(maximum=10), TailBatching()])
    """

    sets = "how long a reward may take"

    def __init__(self, scale: float = 1.5, minimum: float = 2.0, maximum: float = 30.0) -> None:
        for name, value, least in (
            ("scale", scale, 1.0),
            ("minimum", minimum, 0.0),
            ("maximum", maximum, 0.0),
        ):
            if not isinstance(value, int | float) or not least <= value < math.inf:
                fix = "1 or more" if least else "a number of seconds"
                raise ValueError(f"`AdaptiveTimeouts({name}={value!r})`: use {fix}.")
        if not 0 < minimum <= maximum:
            raise ValueError(
                f"`AdaptiveTimeouts({minimum=}, {maximum=})`: `minimum` must be above 0 and at "
                "most `maximum`. Lower `minimum`, or raise `maximum`."
            )
        self.timeouts = AdaptiveTimeout(scale, minimum, maximum)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the limits into the schedule."""
        schedule, _ = rollout_schedule(trainer, self)
        schedule.timeouts = self.timeouts

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log what the limits are."""
        limits = [self.timeouts.of(group.prompt.uid) for group in round.groups]
        anchored = [self.timeouts.anchored(group.prompt.uid) for group in round.groups]
        log_now(
            trainer,
            {
                "reward_timeout/mean": sum(limits) / len(limits),
                "reward_timeout/anchored": sum(anchored) / len(anchored),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """The anchors."""
        return self.timeouts.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with those of a checkpoint."""
        self.timeouts.load_state_dict(state_dict)
