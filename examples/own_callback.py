r"""Your own callback: log the share of completions that match a regular expression.

Such a share shows that a model learns a format, or finds a trick, before the reward does. Here: in
how many completions of the quick task the first try hits the target, so that its line ends in `y`.

    lit-rlsched fit -c configs/quickstart.yaml \
        --trainer.callbacks+=examples.own_callback.PatternShare --trainer.callbacks.pattern='.* y'

Every logger gets the curve `completions/pattern_share`, and `ModelCheckpoint` can monitor it.
"""

import re
from statistics import fmean

from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.settings import UsageError


class PatternShare(RolloutCallback):
    """Log the share of a round's completions that match `pattern` at their beginning.

    Args:
        pattern: Regular expression; `.` matches no newline.
        name: Name of the metric.

    Raises:
        UsageError: `pattern` is not a regular expression.
    """

    def __init__(self, pattern: str, name: str = "completions/pattern_share"):
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            message = f"`PatternShare({pattern=})` is not a regular expression: {error}."
            raise UsageError(message) from None
        self.name = name

    def on_round_end(self, trainer, pl_module, round):
        """Add the share to the metrics of the round, which are logged after this hook."""
        round.metrics[self.name] = fmean(
            self.pattern.match(completion.text) is not None for completion in round.completions
        )
