"""Slots that a round leaves free begin the next round's completions, as drafts."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lit_rlsched.engines.rollout_worker import Worker
from lit_rlsched.rollout.controller import completion_seed
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.types import Event, Group, Request, Sample


@dataclass(frozen=True, slots=True)
class Following:
    """Groups of the next round, whose completions are drawn as drafts."""

    groups: Sequence[Group]
    salt: str
    """Changes the seeds; the round itself may draw the same prompts under the same version."""

    @property
    def tokens(self) -> int:
        """Number of tokens drawn so far."""
        return sum(len(c.token_ids) for group in self.groups for c in group.completions)

    def requests(self, run_seed: int, version: int) -> list[tuple[Sample, Request]]:
        """Return each completion with its request under a policy version."""
        samples = [Sample(group, c) for group in self.groups for c in group.completions]
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
            for sample in samples
        ]


class DraftingWorker(Worker):
    """The worker of a round whose free slots begin drafts of the next.

    Drafts are queued with the first requests of the round, and take a slot only if none of the
    round's requests waits for one. The round sees its own requests. No token of a draft depends on
    when it decodes. Once the round is over, `go_on` decodes the drafts that remain.

    While the trainer verifies the round's own drafts (`during`), its requests are not known yet.
    Drafts have half the slots then, for a number of steps that is known beforehand: as many as it
    takes all slots to process the positions that the trainer does.

    Args:
        worker: Decodes.
        drafts: Completions with their requests.
    """

    def __init__(self, worker: Worker, drafts: Iterable[tuple[Sample, Request]]) -> None:
        super().__init__(worker.admission, worker.slots // worker.admission.slots)
        self.trace = worker.trace
        self._worker = worker
        self._drafts = {request.id: (sample, request) for sample, request in drafts}
        self._waiting = [request for _, request in self._drafts.values()]
        self._own: set[str] = set()

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

    def start_round(self, take_turns: bool, ahead: bool, version: int = 0) -> None:
        self._worker.start_round(take_turns, ahead, version)

    def allow(self, steps: int | None) -> None:
        self._worker.allow(steps)

    def suspend(self, keep: bool = False) -> None:
        self._worker.suspend(keep)

    def resume(self, version: int) -> None:
        self._worker.resume(version)

    def during(self, work: Callable[[], None], positions: int) -> None:
        turns, most = positions // self.slots, self.slots // 2
        if not turns or not (first := self._waiting[:most]):
            work()
            return
        self._waiting = self._waiting[most:]
        self._worker.submit(first)
        self._worker.allow(turns)
        self._worker.begin()  # the engine's process goes on beside the work
        work()
        while self._worker.busy and self.trace.decode_steps < turns:
            self.step()
        self._worker.allow(None)

    def begin(self) -> int:
        return self._worker.begin()

    def submit(self, requests: Iterable[Request]) -> None:
        own = [*requests]
        self._own.update(request.id for request in own)
        drafts, self._waiting = self._waiting, []
        self._worker.submit([*own, *drafts])

    def rekey(self, expected: Mapping[str, float]) -> None:
        self._worker.rekey(expected)

    def step(self) -> list[Event]:
        own, paused = [], []
        for event in self._worker.step():
            if event.request_id not in self._drafts:
                own.append(event)
                if event.finish_reason is not None:
                    self._own.discard(event.request_id)
                continue
            sample, request = self._drafts[event.request_id]
            sample.completion.take(event, event.version)
            if event.finish_reason == "paused":
                request = replace(request, prefix_ids=sample.completion.token_ids[:])
                self._drafts[request.id] = sample, request
                paused.append(request)
            elif event.finish_reason is not None:
                del self._drafts[request.id]
        if paused:
            self._worker.submit(paused)
        return own

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

    def go_on(self, heed: Callable[[], None]) -> None:
        """Decode the drafts to their end; `heed` is called before each step."""
        while self._drafts:
            heed()
            self.step()
