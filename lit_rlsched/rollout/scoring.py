"""From a finished completion's tokens to its scores."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.scheduling.adaptive_timeouts import AdaptiveTimeout
from lit_rlsched.text import printable
from lit_rlsched.types import Completion, Group


class Scorer:
    """Decodes completions as they finish and hands them to the reward scheduler.

    Args:
        scheduler: Runs the reward functions outside this process.
        decode: Token ids to text, special tokens left out.
        timeouts: How long the functions may take for each prompt; by default as long as for any.
        trainer_state: Gives what the functions are told of the training's progress.
        scores: Whether the functions are asked at all.
    """

    def __init__(
        self,
        scheduler: RewardScheduler,
        decode: Callable[[list[int]], str],
        timeouts: AdaptiveTimeout | None = None,
        trainer_state: Callable[[], Any] = lambda: None,
        scores: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.decode = decode
        self.timeouts = timeouts
        self.trainer_state = trainer_state
        self.scores = scores
        self._pending: dict[Hashable, tuple[Group, Completion]] = {}
        self._unscorable: list[tuple[Group, Completion]] = []

    @property
    def names(self) -> list[str]:
        """Of the reward functions."""
        return list(self.scheduler.names)

    def turn(self) -> None:
        """Look at the reward workers, which wait for somebody to do so."""
        self.scheduler.turn()

    def failures(self) -> Counter[str]:
        """What went wrong in reward functions until now: `rewards/<func>/*`."""
        return Counter(self.scheduler.counters())

    def close(self) -> None:
        """End the reward workers."""
        self.scheduler.close()

    @property
    def pending(self) -> int:
        """Completions whose scores are awaited."""
        return len(self._pending) + len(self._unscorable)

    def submit(self, group: Group, completion: Completion) -> None:
        """Start scoring a finished completion."""
        completion.text = self.decode(completion.token_ids)
        if completion.dropped or not self.scores:
            self._unscorable.append((group, completion))
            return
        chat = not isinstance(group.prompt.text, str)
        answer: Any = completion.text
        if chat:
            answer = [{"role": "assistant", "content": completion.text}]
        job_id = f"{group.id}/{completion.index}"
        self._pending[job_id] = (group, completion)
        self.scheduler.submit(
            job_id,
            prompt=group.prompt.text,
            completion=answer,
            completion_ids=completion.token_ids,
            columns={**group.prompt.columns, "finish_reasons": completion.finish_reason},
            timeout=None if self.timeouts is None else self.timeouts.of(group.prompt.uid),
            trainer_state=self.trainer_state(),
        )

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        """Completions scored since the last call; each has its scores only once it is reached."""
        unscorable, self._unscorable = self._unscorable, []
        for group, completion in unscorable:
            completion.scores = [None] * len(self.scheduler.names)
            yield group, completion
        for job in self.scheduler.poll():
            if job.job_id not in self._pending:
                continue  # forgotten since
            group, completion = self._pending.pop(job.job_id)
            completion.scores = job.scores
            failed = zip(self.scheduler.names, job.failures, strict=True)
            completion.failure = next((f"`{name}`: {why}" for name, why in failed if why), None)
            if completion.failure:  # siblings have what is missing here: the rest is no reward
                completion.scores = [None] * len(job.scores)
            completion.extra, completion.logged = printable(job.extra), printable(job.metrics)
            if self.timeouts is not None:
                seconds = max((s for s in job.seconds if s is not None), default=0.0)
                self.timeouts.observe(group.prompt.uid, seconds, completion.correct)
            yield group, completion

    def wait(self, timeout: float | None = None) -> None:
        """Block until a score has arrived, `timeout` seconds at most."""
        assert self.pending, "nothing to wait for"
        if not self._unscorable:
            self.scheduler.wait(timeout)

    def cancel(self, group: Group | None = None) -> None:
        """Forget whatever is pending, or what is pending of a group."""
        forgotten = [k for k, (g, _) in self._pending.items() if group is None or g is group]
        self.scheduler.cancel(forgotten)
        for job_id in forgotten:
            del self._pending[job_id]
        self._unscorable = [(g, c) for g, c in self._unscorable if group and g is not group]
