"""A stopwatch that continues in a resumed run."""

import time


class Clock:
    """Measures the time in `fit` since a run began, including the runs it was resumed from."""

    def __init__(self) -> None:
        self.before = 0.0
        """Seconds until the last `stop`, or of the checkpoint."""
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Time measured so far."""
        return self.before + (0.0 if self._started is None else time.monotonic() - self._started)

    def at(self, moment: float) -> float:
        """Return what it shows at a moment of `time.monotonic` since it was started."""
        return self.seconds - (time.monotonic() - moment)

    def start(self) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def stop(self) -> None:
        """Stop the clock."""
        self.before, self._started = self.seconds, None
