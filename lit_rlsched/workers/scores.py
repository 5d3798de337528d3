"""A worker that calls reward functions. Run as a script; imports little."""

import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# for this import only: the package of the parent, even if another copy is installed
sys.path.insert(0, str(Path(__file__).parents[2]))
from lit_rlsched.workers.child import Call, Child

del sys.path[0]


class Scores(Child):
    """Calls the reward functions for one completion at a time; coroutines together, afterwards."""

    def serve(self) -> None:
        """Score batches until the parent closes the connection."""
        self._functions, setup = self.load()
        if any(setup["is_async"][index] for index in self._functions):
            import asyncio  # a third of the time that a worker takes to start

            # one event loop for all calls: clients that functions keep open are bound to it
            runner = asyncio.Runner()
        while True:
            try:
                batch = pickle.loads(self.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            self.send("begun", time.monotonic())
            waiting = []
            for key, payload, timeout, indices in batch:
                for index in indices:
                    call = Call(key, index, payload, timeout, self.offered[index])
                    if setup["is_async"][index]:
                        waiting.append(call)
                        continue
                    with call:
                        call.take(self._functions[index](**call.keywords()))
                    self._report(call)
            if waiting:
                runner.run(self._score_together(waiting))

    async def _score_together(self, waiting: Sequence[Call]) -> None:
        """Run coroutines side by side, each within its time-out."""
        import asyncio

        async def score(call: Call) -> None:
            with call:
                scope = asyncio.timeout(call.timeout)
                try:
                    async with scope:
                        call.take(await self._functions[call.index](**call.keywords()))
                except TimeoutError:
                    if not scope.expired():
                        raise
                    call.failure = call.late
            self._report(call)

        await asyncio.gather(*map(score, waiting))

    def _report(self, call: Call) -> None:
        """Tell the trainer how a call has ended."""
        now = time.monotonic()
        report = ("score", call.key, call.index, now, now - call.start, call.score, call.failure)
        self.send(*report, *call.logged)


if __name__ == "__main__":
    Scores(*map(int, sys.argv[1:])).serve()
