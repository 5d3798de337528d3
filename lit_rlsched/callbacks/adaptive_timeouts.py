"""RollPacker's reward time-outs, which adapt to how long correct completions take."""

from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.time_limits import AdaptiveTimeout
from lit_rlsched.settings import UsageError
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, Schedule


class AdaptiveTimeouts(RolloutCallback):
    """Kill reward calls that take much longer than those for correct completions of the prompt.

    RollPacker (arXiv 2509.21009, section 4.3). A call of a reward function may take
    `min(max(minimum, scale * anchor), maximum)` seconds. The anchor is the longest call so far for
    a correct completion (first reward 1.0 or more) of the same prompt. Without an anchor the limit
    is `maximum`, which replaces `reward_timeout`.

    Bias: against completions that are slow to score. A killed call gives no reward and is counted
    in `rewards/<func>/timeouts`.

    See `docs/explanation/streaming_and_parallelism.md`.

    Args:
        scale: Multiple of the anchor.
        minimum: Lower bound in seconds, since calls take longer on a busy machine.
        maximum: Upper bound in seconds.

    Raises:
        UsageError: an argument is out of range.

    Example::

        Trainer(callbacks=[AdaptiveTimeouts(maximum=10), TailBatching()])
    """

    sets = "how long a reward may take"

    def __init__(self, scale: float = 1.5, minimum: float = 2.0, maximum: float = 30.0) -> None:
        if minimum > maximum:
            raise UsageError(
                f"`AdaptiveTimeouts({minimum=}, {maximum=})`: `minimum` must be at most "
                "`maximum`. Lower `minimum`, or raise `maximum`."
            )
        self.timeouts = AdaptiveTimeout(scale, minimum, maximum)

    def describe(self) -> str:
        """Return the settings in words."""
        at = self.timeouts
        return (
            f"a reward call may take {at.scale:g} times as long as those of correct completions of "
            f"its prompt ({at.minimum:g} to {at.maximum:g} s)"
        )

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the time-outs."""
        schedule.timeouts = self.timeouts

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log the time-outs of the round's prompts."""
        limits = [self.timeouts.of(group.prompt.uid) for group in round.groups]
        anchored = [self.timeouts.anchored(group.prompt.uid) for group in round.groups]
        round.metrics |= {
            "reward_timeout/mean": sum(limits) / len(limits),
            "reward_timeout/anchored": sum(anchored) / len(anchored),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the anchors."""
        return self.timeouts.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the anchors."""
        self.timeouts.load_state_dict(state_dict)
