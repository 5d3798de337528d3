"""Your own length predictor: completions become as long as those of earlier problems of this size.

Where completions wait for a slot, the ones predicted to become longest start first, so that a round
does not end with a few long ones that started last. A problem of the quick task has two, three or
four numbers, and its column `size` says how many.

    lit-rlsched fit -c configs/quickstart.yaml -c examples/own_predictor.yaml
"""

from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.scheduling.length_prediction import LengthPredictor


class MeanOfSize(LengthPredictor):
    """Predict the mean length of the completions that a column's value had so far.

    Args:
        column: Name of the column.
        first_guess: Number of tokens predicted for a value that never came before.
    """

    def __init__(self, column: str = "size", first_guess: float = 100.0):
        self.column = column
        self.first_guess = first_guess
        self.totals: dict[object, list[float]] = {}  # value -> completions, their tokens

    def predict(self, samples):
        """Return the number of tokens that each of the unfinished completions will still draw."""
        return [max(1.0, self._mean(s) - len(s.completion.token_ids)) for s in samples]

    def _mean(self, sample):
        count, tokens = self.totals.get(self._value(sample), (1, self.first_guess))
        return tokens / count

    def _value(self, sample):
        return sample.group.prompt.columns[self.column]

    def observe(self, samples):
        """Learn from the finished completions of a round."""
        for sample in samples:
            total = self.totals.setdefault(self._value(sample), [0, 0])
            total[0] += 1
            total[1] += len(sample.completion.token_ids)

    def state_dict(self):
        """Return what a resumed run needs in order to predict the same."""
        return {"totals": [[value, *total] for value, total in self.totals.items()]}

    def load_state_dict(self, state):
        self.totals = {value: total for value, *total in state["totals"]}


class PrintCalibration(RolloutCallback):
    """Print after each round how good the predictions were, beside those of `PromptHistory`."""

    def on_round_end(self, trainer, pl_module, round):
        """Print the mean error and the rank correlation, on which the order depends."""
        error, rank, history_error, history_rank = (
            round.metrics[f"length_prediction/{name}"]
            for name in ("mae", "rank_correlation", "history_mae", "history_rank_correlation")
        )
        print(
            f"round {round.number}: error {error:.0f} tokens (history {history_error:.0f}), "
            f"rank correlation {rank:.2f} (history {history_rank:.2f})"
        )
