"""How a round went, in one line that a person can read."""

import time
from collections.abc import Mapping

from lit_rlsched.text import duration, percent
from lit_rlsched.training.round import Round


class RoundLine:
    """Collects what happens in a round and says it in one line."""

    def __init__(self) -> None:
        self._rollout_ended = self._update_ended = 0.0
        self._round: Round | None = None
        self.accuracy: float | None = None
        """Held-out accuracy, if it was measured since the last line."""

    def rollout_ends(self, round: Round) -> None:
        """Remember the round and start the clock of its update."""
        self._round, self._rollout_ended = round, time.monotonic()

    def step_ends(self) -> None:
        """Stop the clock of the update, if this is its last step."""
        self._update_ended = time.monotonic()

    def text(self, head: str, left: float | None, others: Mapping[str, object]) -> str:
        """Return the line of the round that has ended, and forget the round.

        Args:
            head: Beginning of the line.
            left: Seconds until the run ends, if that is known.
            others: More values to show, by name.
        """
        parts = [] if self._round is None else self._results(self._round)
        if self.accuracy is not None:
            parts.insert(min(1, len(parts)), f"held-out accuracy {self.accuracy:.2f}")
        parts += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in others.items()]
        if left is not None:
            parts.append(f"{duration(left)} left")
        self._round = self.accuracy = None
        return f"{head}: {', '.join(parts)}"

    def _results(self, round: Round) -> list[str]:
        metrics = round.metrics
        return [
            f"reward {metrics['reward']:.3f}",
            f"{metrics['rollout/tokens_per_second']:,.0f} tokens/s",
            f"{metrics['completions/mean_length']:.0f} tokens on average",
            f"{percent(metrics['completions/clipped_ratio'])} cut",
            f"{percent(metrics['rollout/bubble_ratio'])} idle",
            f"rollout {duration(metrics['time/rollout'])}",
            f"update {duration(max(0.0, self._update_ended - self._rollout_ended))}",
        ]
