"""From a finished completion's tokens to its scores."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lit_rlsched.rewards.jobs import ScoredJob
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.scheduling.time_limits import AdaptiveTimeout
from lit_rlsched.text import printable
from lit_rlsched.types import Completion, Group, Sample

SCORE_SECONDS = 0.05
"""Longest wait for the scores of drafts before something else is looked at."""


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
        self.waits: list[tuple[float, float]] = []
        """Start and end of each `wait`, until somebody takes them."""
        self._pending: dict[Hashable, tuple[Group, Completion]] = {}
        self._unscorable: list[tuple[Group, Completion]] = []
        self._ahead: dict[Hashable, _Ahead] = {}
        self._known: list[ScoredJob] = []
        """Of completions that were submitted when they were scored already."""
        self.kept_ahead = 0
        """Completions of this round whose scoring had begun before it."""

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return list(self.scheduler.names)

    def turn(self, seconds: float = 0.0) -> None:
        """Let the reward scheduler handle what its workers have sent.

        Args:
            seconds: Maximum time to wait for a score.
        """
        self.scheduler.turn(seconds)
        if self._ahead:
            self._known += self._note_ahead(self.scheduler.poll())

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

    def read(self, completion: Completion) -> None:
        """Set the text of a completion, which checkpoints leave out."""
        completion.text = completion.text or self.decode(completion.own_ids)

    def submit(self, group: Group, completion: Completion) -> None:
        """Start scoring a finished completion."""
        completion.text = self.decode(completion.own_ids)
        if completion.dropped or not self.scores:
            self._unscorable.append((group, completion))
            return
        job_id = f"{group.id}/{completion.index}"
        self._pending[job_id] = (group, completion)
        ahead = self._ahead.pop(job_id, None)
        if ahead is not None and ahead.token_ids == completion.token_ids:
            self.kept_ahead += 1
            self._known += [ahead.job] if ahead.job is not None else []
            return
        if ahead is not None:
            self.scheduler.cancel([job_id])
        self._start(group, completion)

    def submit_ahead(self, group: Group, completion: Completion) -> None:
        """Start scoring a draft that has ended, before it is verified.

        `submit` uses the score if the completion has become the same.
        """
        if not self.scores_drafts:
            return
        completion.text = self.decode(completion.own_ids)
        self._ahead[f"{group.id}/{completion.index}"] = _Ahead(completion.token_ids)
        self._start(group, completion)

    @property
    def scores_drafts(self) -> bool:
        """Whether scores do not depend on the progress of training or on adaptive time-outs."""
        asks = self.scheduler.asks_for("trainer_state")
        return self.scores and self.timeouts is None and not asks

    def score_drafts(self, samples: Sequence[Sample], heed: Callable[[], None]) -> None:
        """Set the scores of ended drafts, given as completions, once they are there.

        `heed` is called while it waits.
        """
        for sample in samples:
            if sample.id not in self._ahead:  # after a resume
                self.submit_ahead(sample.group, sample.completion)
        began = time.monotonic()
        for sample in samples:
            while (job := self._ahead[sample.id].job) is None:
                heed()
                self.turn(SCORE_SECONDS)
            self._give(sample.completion, job)
        self.waits.append((began, time.monotonic()))

    @property
    def scores_ahead(self) -> bool:
        """Whether scores of drafts are missing."""
        return any(ahead.job is None for ahead in self._ahead.values())

    def forget_ahead(self, ids: Collection[Hashable] | None = None) -> None:
        """Forget drafts that were verified and not kept whole, by id; by default all."""
        gone = self._ahead.keys() & (self._ahead.keys() if ids is None else set(ids))
        self.scheduler.cancel(gone)
        for job_id in gone:
            del self._ahead[job_id]

    def _note_ahead(self, jobs: Iterable[ScoredJob]) -> list[ScoredJob]:
        """Keep the scores of drafts, and return the others; what was cancelled has none."""
        for job in (jobs := [*jobs]):
            if (ahead := self._ahead.get(job.job_id)) is not None:
                ahead.job = job
        return [job for job in jobs if job.job_id in self._pending]

    def arguments(self, group: Group, completion: Completion) -> dict[str, Any]:
        """Return what functions are called with, for `workers.messages.packed_row`."""
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

    def _start(self, group: Group, completion: Completion) -> None:
        self.scheduler.submit(
            f"{group.id}/{completion.index}",
            **self.arguments(group, completion),
            timeout=self.timeout(group),
            given=completion.given,
        )

    def poll(self) -> Iterator[tuple[Group, Completion]]:
        """Yield completions scored since the last call; scores are set as each one is reached."""
        unscorable, self._unscorable = self._unscorable, []
        for group, completion in unscorable:
            completion.scores = [None] * len(self.scheduler.names)
            yield group, completion
        known, self._known = self._known, []
        for job in (*known, *self._note_ahead(self.scheduler.poll())):
            if job.job_id not in self._pending:
                continue  # cancelled since
            group, completion = self._pending.pop(job.job_id)
            self._give(completion, job)
            if self.timeouts is not None:
                seconds = max((s for s in job.seconds if s is not None), default=0.0)
                self.timeouts.observe(group.prompt.uid, seconds, completion.correct)
            yield group, completion

    def _give(self, completion: Completion, job: ScoredJob) -> None:
        completion.scores = job.scores
        completion.reward_seconds = float(sum(s for s in job.seconds if s is not None))
        failed = zip(self.scheduler.names, job.failures, strict=True)
        completion.failure = next((f"`{name}`: {why}" for name, why in failed if why), None)
        if completion.failure:  # the sum of the other scores would not compare with siblings'
            completion.scores = [None] * len(job.scores)
        completion.extra, completion.logged = printable(job.extra), printable(job.metrics)

    def wait(self, timeout: float | None = None) -> None:
        """Block until a score has arrived, at most `timeout` seconds."""
        assert self.pending, "nothing to wait for"
        if not self._unscorable and not self._known:
            began = time.monotonic()
            self.scheduler.wait(timeout)
            self.waits.append((began, time.monotonic()))

    def cancel(self, group: Group | None = None) -> None:
        """Forget the pending completions of a group, by default all of them."""
        forgotten = [k for k, (g, _) in self._pending.items() if group is None or g is group]
        self.scheduler.cancel(forgotten)
        for job_id in forgotten:
            del self._pending[job_id]
        self._known = [job for job in self._known if job.job_id in self._pending]
        self._unscorable = [(g, c) for g, c in self._unscorable if group and g is not group]


@dataclass(slots=True)
class _Ahead:
    """A draft that has ended and is scored."""

    token_ids: Sequence[int]
    job: ScoredJob | None = None


class Unscored:
    """Scores nothing: every completion has an empty list of scores at once."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.waits: list[tuple[float, float]] = []
        self._finished: list[tuple[Group, Completion]] = []

    @property
    def pending(self) -> int:
        return len(self._finished)

    def wait(self, timeout: float | None = None) -> None:
        pass

    def read(self, completion: Completion) -> None:
        pass

    def submit(self, group: Group, completion: Completion) -> None:
        self._finished.append((group, completion))

    def submit_ahead(self, group: Group, completion: Completion) -> None:
        pass

    def forget_ahead(self, ids: Collection[Hashable] | None = None) -> None:
        pass

    def turn(self, seconds: float = 0.0) -> None:
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


class EarlyStop(Protocol):
    """Decides when a group needs no more completions."""

    def waits(self, group: Group) -> bool:
        """Return whether the group might stop once its pending scores are there."""

    def stops(self, group: Group) -> bool:
        """Return whether the scored completions are enough, so that the others are aborted."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """Hooks through which scores affect a running round.

    The loop blocks for scores that could change the next decode step, so the speed of reward
    functions changes nothing that is drawn.
    """

    stop: EarlyStop | None = None
    """Asked about a group that still decodes each time some of its completions finish."""
    more: Callable[[Group], Group | None] | None = None
    """Called with each complete group; may return another group to run in this round."""
