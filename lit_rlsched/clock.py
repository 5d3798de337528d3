"""A stopwatch that continues in a resumed run."""

import time


class Clock:
    """Measures the time in `fit` since a run began, including the runs it was resumed from."""

    def __init__(self) -> None:
        self.before = 0.0
        """Seconds until the last `stop`, or of the checkpoint."""
        self._runs = False
        self._since = 0.0
        """When `before` seconds were over: at the last start, or at the stop after it."""

    @property
    def seconds(self) -> float:
        """Time measured so far."""
        return self.at(time.monotonic()) if self._runs else self.before

    def at(self, moment: float) -> float:
        """Return what it shows at a moment of `time.monotonic` since it was started."""
        return self.before + moment - self._since

    def start(self) -> None:
        """Start the clock."""
        self._runs, self._since = True, time.monotonic()

    def stop(self) -> None:
        """Stop the clock."""
        if self._runs:
            now = time.monotonic()
            self.before, self._since, self._runs = self.at(now), now, False
