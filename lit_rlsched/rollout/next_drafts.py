"""Slots that a round leaves free begin the next round's completions, as drafts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lit_rlsched.engines.rollout_worker import Worker
from lit_rlsched.rollout.controller import completion_seed
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Event, Group, Request, Sample


@dataclass(slots=True)
class Following:
    """Groups of the next round, whose completions are drawn as drafts.

    A completion that has tokens or a draft already is left as it is: a draft has one version.
    """

    groups: Sequence[Group]
    salt: str
    """Changes the seeds; the round itself may draw the same prompts under the same version."""
    goes_on: bool = True
    """Whether `RolloutSession.go_on` draws the drafts to their end after the round. Otherwise they
    are cut where the round ends."""
    samples: list[Sample] = field(init=False)
    """The completions that are drawn."""

    def __post_init__(self) -> None:
        samples = (Sample(group, c) for group in self.groups for c in group.completions)
        self.samples = [s for s in samples if not s.completion.token_ids and not s.completion.draft]

    @property
    def tokens(self) -> int:
        """Number of tokens drawn so far."""
        return sum(sample.completion.drawn for sample in self.samples)

    @property
    def begun(self) -> int:
        """Number of completions that have tokens."""
        return sum(bool(sample.completion.token_ids) for sample in self.samples)

    def put_off(self) -> None:
        """Turn all completions that were begun into drafts for the next round to verify."""
        for sample in self.samples:
            if sample.completion.token_ids:
                sample.completion.put_off()
                sample.completion.attempts -= 1  # verified and drawn on, it is the first draw

    def requests(self, run_seed: int, version: int) -> list[tuple[Sample, Request]]:
        """Return each completion with its request under a policy version."""
        return [
            (
                sample,
                Request(
                    id=sample.id,
                    prompt_ids=sample.group.prompt.token_ids,
                    seed=completion_seed(
                        run_seed, sample.group, sample.completion, version, self.salt
                    ),
                    sampling=sample.group.sampling,
                    later=True,
                ),
            )
            for sample in self.samples
        ]


class DraftingWorker(Worker):
    """The worker of a round whose free slots begin drafts of the next.

    Drafts are queued with the first requests of the round, and take a slot only if none of the
    round's requests waits for one. The round sees its own requests. No token of a draft depends on
    when it decodes. Once the round is over, `go_on` decodes the drafts that remain, or `cut` ends
    them.

    While the trainer verifies the round's own drafts part by part (`during`), its requests become
    known part by part, and take the next slot that a draft leaves. Engine and trainer wait for each
    other after each part: the engine makes a fixed number of steps.

    Args:
        worker: Decodes.
        drafts: Completions with their requests.
    """

    def __init__(self, worker: Worker, drafts: Sequence[tuple[Sample, Request]]) -> None:
        super().__init__(worker.admission, worker.slots // worker.admission.slots)
        self.trace = worker.trace
        self._worker = worker
        self._drafts = {request.id: (sample, request) for sample, request in drafts}
        self._waiting = [request for _, request in self._drafts.values()]
        self._verifying = False
        self._own: set[str] = set()
        self._ended: list[Sample] = []

    @property
    def drafts(self) -> int:  # type: ignore[override]
        return len(self._drafts)

    @property
    def busy(self) -> bool:
        return self._worker.busy

    def metrics(self) -> dict[str, float]:
        return self._worker.metrics()

    def start_trace(self) -> RolloutTrace:
        self.trace = self._worker.start_trace()
        return self.trace

    def start_round(self, ahead: bool, version: int = 0) -> None:
        self._worker.start_round(ahead, version)

    def allow(self, steps: int | None) -> None:
        self._worker.allow(steps)

    def suspend(self, keep: bool = False) -> None:
        self._worker.suspend(keep)

    def resume(self, version: int) -> None:
        self._worker.resume(version)

    def during(self, work: Callable[[], None], turns: int) -> Iterator[list[Event]]:
        if not self._verifying:
            self.submit([])
            self._verifying = True
        until = self.trace.decode_steps + turns
        self._worker.allow(turns)
        if turns and self._worker.busy:
            self._worker.begin()  # the engine's process goes on beside the work
        work()
        while self._worker.busy and self.trace.decode_steps < until:
            yield self.step()
        self._worker.allow(0)  # what is submitted next begins with the next part

    def all_submitted(self) -> None:
        self._verifying = False
        self._worker.allow(None)
        if self._worker.busy:
            self._worker.begin()  # whatever the trainer does with what is whole already

    def begin(self) -> int:
        return self._worker.begin()

    def submit(self, requests: Iterable[Request]) -> None:
        own = [*requests]
        if self._verifying:
            self._own.update(request.id for request in own)
            self._worker.submit(own)
            return
        if not self._waiting and any(request.id not in self._own for request in own):
            self._make_way()
        self._own.update(request.id for request in own)
        drafts, self._waiting = self._waiting, []
        self._worker.submit([*own, *drafts])

    def _make_way(self) -> None:
        """Let the drafts wait, behind requests that the round adds: none may wait for a draft."""
        self._take(self._worker.abort([*self._drafts]))
        for name, (sample, request) in self._drafts.items():
            request = replace(request, prefix_ids=sample.completion.token_ids[:])
            self._drafts[name] = sample, request
            self._waiting.append(request)

    def step(self) -> list[Event]:
        own, of_drafts = [], []
        for event in self._worker.step():
            if event.request_id in self._drafts:
                of_drafts.append(event)
                continue
            own.append(event)
            if event.finish_reason is not None:
                self._own.discard(event.request_id)
        if paused := self._take(of_drafts):
            self._worker.submit(paused)
        return own

    def _take(self, events: Iterable[Event]) -> list[Request]:
        """Add tokens to the drafts, and return the requests of those that have paused."""
        paused = []
        for event in events:
            sample, request = self._drafts[event.request_id]
            sample.completion.take(event, event.version)
            if event.finish_reason == "paused":
                request = replace(request, prefix_ids=sample.completion.token_ids[:])
                self._drafts[request.id] = sample, request
                paused.append(request)
            elif event.finish_reason is not None:
                del self._drafts[request.id]
                self._ended.append(sample)
        return paused

    def abort(self, request_ids: Collection[str] | None = None) -> list[Event]:
        """Drop these requests of the round, or all of them; drafts go on."""
        ids = self._own & set(self._own if request_ids is None else request_ids)
        self._own -= ids
        return self._worker.abort([*ids]) if ids else []

    def end_round(self) -> None:
        """Begin the trace of the drafts, now that the round is over."""
        tokens = {
            name: len(sample.completion.token_ids) - len(request.prefix_ids)
            for name, (sample, request) in self._drafts.items()
        }
        self.trace = self._worker.split_trace(tokens)

    def cut(self) -> None:
        """End the drafts with the tokens that they have, now that the round is over."""
        self._take(self._worker.abort())
        self._drafts.clear()

    def go_on(self, heed: Callable[[], None], scorer: Scorer) -> None:
        """Decode the drafts to their end, and start to score them.

        Args:
            heed: Called before each step.
            scorer: Scores nothing else meanwhile.
        """
        while True:
            for sample in self._ended:
                scorer.submit_ahead(sample.group, sample.completion)
            self._ended.clear()
            scorer.turn()
            if not self._drafts:
                return
            heed()
            self.step()
