"""From a finished completion's tokens to its scores."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.scheduling.rollpacker import AdaptiveTimeout
from lit_rlsched.text import printable
from lit_rlsched.types import Completion, Group, Sample


class Scorer:
    """Scores completions as they finish, through the reward workers.

    Args:
        scheduler: Runs the reward functions outside this process.
        decode: Turns token ids into the text that rewards see.
        timeouts: Time-out of a reward call by prompt; by default the scheduler's own.
        trainer_state: Returns the training progress that reward functions may ask for, given the
            number of optimizer steps.
        scores: Whether reward functions run at all; without, every score is `None`.
    """

    def __init__(
        self,
        scheduler: RewardScheduler,
        decode: Callable[[Sequence[int]], str],
        timeouts: AdaptiveTimeout | None = None,
        trainer_state: Callable[[int], Any] = lambda step: None,
        scores: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.decode = decode
        self.timeouts = timeouts
        self.trainer_state = trainer_state
        self.scores = scores
        self.version = 0
        """Policy version of the rollout."""
        self._pending: dict[Hashable, tuple[Group, Completion]] = {}
        self._unscorable: list[tuple[Group, Completion]] = []

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return list(self.scheduler.names)

    def serve(self) -> None:
        """Let the reward scheduler handle what its workers have sent."""
        self.scheduler.serve()

    def failures(self) -> Counter[str]:
        """Return failures of reward functions since the run began: `rewards/<func>/*`."""
        return Counter(self.scheduler.counters())

    def close(self) -> None:
        """End the reward workers."""
        self.scheduler.close()

    @property
    def pending(self) -> int:
        """Number of submitted completions that `poll` has not returned yet."""
        return len(self._pending) + len(self._unscorable)

    def submit(self, group: Group, completion: Completion) -> None:
        """Start scoring a finished completion; one that has its scores keeps them."""
        completion.text = self.decode(completion.own_ids)
        if completion.scored or completion.dropped or not self.scores:
            self._unscorable.append((group, completion))
            return
        job_id = f"{group.id}/{completion.index}"
        self._pending[job_id] = (group, completion)
        self.scheduler.submit(
            job_id,
            **self.arguments(group, completion),
            timeout=self.timeout(group),
            given=completion.given,
        )

    def arguments(self, group: Group, completion: Completion) -> dict[str, Any]:
        """Return what functions are called with, for `workers.pool.packed_row`."""
        answer: Any = completion.shown
        if answer is completion.text and not isinstance(group.prompt.text, str):  # a chat
            answer = [{"role": "assistant", "content": completion.text}]
        return {
            "prompt": Sample(group, completion).prompt,
            "completion": answer,
            "completion_ids": completion.own_ids,
            "columns": {**group.prompt.columns, "finish_reasons": completion.finish_reason},
            "trainer_state": self.trainer_state(self.version),
        }

    def timeout(self, group: Group) -> float | None:
        """Return the seconds that a function may take, if they are the prompt's own."""
        return None if self.timeouts is None else self.timeouts.of(group.prompt.uid)

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        """Yield completions scored since the last call; scores are set as each one is reached."""
        unscorable, self._unscorable = self._unscorable, []
        for group, completion in unscorable:
            if not completion.scored:
                completion.scores = [None] * len(self.scheduler.names)
            yield group, completion
        for job in self.scheduler.poll():
            if job.job_id not in self._pending:
                continue  # cancelled since
            group, completion = self._pending.pop(job.job_id)
            completion.scores = job.scores
            completion.reward_seconds = float(sum(s for s in job.seconds if s is not None))
            failed = zip(self.scheduler.names, job.failures, strict=True)
            completion.failure = next((f"`{name}`: {why}" for name, why in failed if why), None)
            if completion.failure:  # the sum of the other scores would not compare with siblings'
                completion.scores = [None] * len(job.scores)
            completion.extra = job.extra and printable(job.extra)
            completion.logged = job.metrics and printable(job.metrics)
            if self.timeouts is not None:
                seconds = max((s for s in job.seconds if s is not None), default=0.0)
                self.timeouts.observe(group.prompt.uid, seconds, completion.correct)
            yield group, completion

    def wait(self, timeout: float | None = None) -> bool:
        """Block until a score has arrived, at most `timeout` seconds; return whether it had to."""
        assert self.pending, "nothing to wait for"
        if self._unscorable:
            return False
        self.scheduler.wait(timeout)
        return True

    def cancel(self, group: Group | None = None) -> None:
        """Forget the pending completions of a group, by default all of them."""
        forgotten = [k for k, (g, _) in self._pending.items() if group is None or g is group]
        self.scheduler.cancel(forgotten)
        for job_id in forgotten:
            del self._pending[job_id]
        self._unscorable = [(g, c) for g, c in self._unscorable if group and g is not group]


class Unscored:
    """Scores nothing: every completion has an empty list of scores at once."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._finished: list[tuple[Group, Completion]] = []

    @property
    def pending(self) -> int:
        return len(self._finished)

    def wait(self, timeout: float | None = None) -> bool:
        return False

    def submit(self, group: Group, completion: Completion) -> None:
        self._finished.append((group, completion))

    def serve(self) -> None:
        pass

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        finished, self._finished = self._finished, []
        for group, completion in finished:
            completion.scores = []
            yield group, completion

    def cancel(self, group: Group | None = None) -> None:
        self._finished = [(g, c) for g, c in self._finished if group and g is not group]

    def failures(self) -> Counter[str]:
        return Counter()

    def close(self) -> None:
        pass
