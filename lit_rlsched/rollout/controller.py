"""The only loop: events from the engine, tokens into completions, scores into groups."""

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lit_rlsched.engines.rollout_worker import Worker
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule, RoundState
from lit_rlsched.types import Completion, Event, Group, Request, Sample, frozen, stable_hash

HEED_SECONDS = 0.5
"""Longest wait for a score without a look at whether to stop."""


def completion_seed(
    run_seed: int, group: Group, completion: Completion, version: int, salt: str = ""
) -> int:
    """The seed of one completion: a function of what it is, never of when or with whom it runs."""
    return stable_hash(
        run_seed, salt, group.prompt.uid, completion.index, version, len(completion.token_ids)
    )


class EarlyStop(Protocol):
    """Says when a group needs no more completions."""

    def waits(self, group: Group) -> bool:
        """Whether scores that are awaited could be enough to stop the group."""

    def stops(self, group: Group) -> bool:
        """Whether what is scored is enough; what still decodes of the group is then aborted."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What scores change in a round that decodes.

    Before its next step the round waits for the scores that could change it: how long reward
    functions take decides nothing.
    """

    stop: EarlyStop | None = None
    """Asked with each group that still decodes when some of it has finished."""
    more: Callable[[Group], Group | None] | None = None
    """Asked with each group that is complete: another one to run in this round as well."""


class RolloutController:
    """Runs a round's groups to the end that its rule defines. Knows nothing of torch or Lightning.

    With a predictor, every completion first decodes `probe_tokens` tokens and pauses; what is left
    of it is then predicted, and the admission orders what waits by that. A pause changes no token.
    Where every completion has a slot, none pauses.

    Args:
        worker: Engine and admission.
        scorer: Turns finished completions into scores while others still decode.
        seed: The run's seed.
        lengths: Predicts how long completions become; asked and taught in `run(predict=True)`.
        probe_tokens: Tokens after which it is asked; 0: before anything is drawn.
        on_completion: Called with each completion once its scores are there.
        on_group: Called with each group once all of its completions are scored.
        heed: Called before each step, and now and then while scores are awaited; may raise, and the
            round is dropped.
    """

    def __init__(
        self,
        worker: Worker,
        scorer: Scorer,
        *,
        seed: int,
        lengths: CalibratedPredictor | None = None,
        probe_tokens: int = 0,
        on_completion: Callable[[Completion], None] = lambda completion: None,
        on_group: Callable[[Group], None] = lambda group: None,
        heed: Callable[[], None] = lambda: None,
    ) -> None:
        self.worker = worker
        self.scorer = scorer
        self.seed = seed
        self.lengths = lengths
        self.probe_tokens = probe_tokens
        self.drops: Counter[str] = Counter()
        """Completions dropped, by reason, since the run began."""
        self.waited = 0.0
        """Seconds for which the round's slots idled for scores."""
        self._on_completion = on_completion
        self._on_group = on_group
        self._heed = heed
        self._live: dict[str, tuple[Sample, Request]] = {}
        self._undecoded: dict[str, int] = {}
        self._came_finished: list[Sample] = []
        self._places: dict[str, int] = {}
        self._decoded_at: dict[str, tuple[int, int]] = {}
        self._state = RoundState([], 0)
        self._version = 0
        self._salt = ""
        self._probe = 0
        self._lengths: CalibratedPredictor | None = None
        self._feedback = Feedback()
        self._rule: RoundRule = FullRound(0)
        self._patience = 0.0

    @property
    def state(self) -> RoundState:
        """Of the round, as its rule sees it."""
        return self._state

    @property
    def waits_for_scores(self) -> bool:
        """Whether the round may wait for scores while it decodes."""
        feedback = self._feedback.stop or self._feedback.more
        return bool(feedback) or self._rule.patience is not None

    def run(
        self,
        groups: Sequence[Group],
        rule: RoundRule,
        version: int,
        salt: str = "",
        predict: bool = False,
        feedback: Feedback | None = None,
    ) -> Iterator[Group]:
        """Draw what the groups lack and yield each group as it completes.

        A completion that the end of the round leaves unfinished has the tokens drawn until then.

        Args:
            groups: The round's groups. A completion that has tokens goes on from them, and is
                submitted before those that have none. A finished one is not decoded; it is scored
                if it has no scores yet.
            rule: Says when the round is over; what is unfinished then is aborted.
            version: Policy version of the engine's weights.
            salt: Keeps the seeds of another use of the same prompts (validation) apart.
            predict: Whether these completions are predicted and learned from.
            feedback: What scores change while the round decodes; by default nothing.
        """
        self._version, self._salt, self._rule = version, salt, rule
        self._patience = rule.patience or 0.0
        self._feedback, self.waited = feedback or Feedback(), 0.0
        self._lengths = lengths = self.lengths if predict else None
        if lengths is not None:
            lengths.start_round()
        samples = [Sample(g, c) for g in groups for c in g.completions]
        self._state = RoundState(list(groups), len(samples), patient=rule.patience is not None)
        self._came_finished = []
        self._undecoded = {g.id: len(g.completions) for g in groups}
        self._places, self._decoded_at = {g.id: i for i, g in enumerate(groups)}, {}
        try:
            samples = self._unfinished(samples)
            samples.sort(key=lambda sample: not sample.completion.token_ids)
            waits = len(samples) > self.worker.admission.slots
            waits = waits or self.worker.admission.budget is not None
            self._probe = self.probe_tokens if lengths is not None and waits else 0
            self.worker.start_round(
                take_turns=not rule.discards(self._state), ahead=not self._intervenes(waits)
            )
            self._submit(samples)
            yield from self._react([])  # to drafts that were kept whole: they may be enough
            while self._live and not rule.done(self._state):
                self._heed()
                events = self.worker.step()
                self._state.final = len(self._state.decoded)  # who comes now comes after them
                yield from self._react(self._take(events))
            self._take(self.worker.abort())
            self._state.patient = False
            races = rule.patience is not None
            while self.scorer.pending and not (races and rule.done(self._state)):
                self._heed()
                self.scorer.wait(HEED_SECONDS)
                yield from self._scored()
        finally:
            self.worker.abort()
            self.scorer.cancel()
            self._live.clear()

    def end_predictions(self) -> dict[str, float]:
        """Let the predictor learn from a round that came to its end; how good it was."""
        return {} if self.lengths is None else self.lengths.end_round()

    def _intervenes(self, waits: bool) -> bool:
        """Whether what is done between two steps may change what other completions do.

        `waits`: Whether some wait for a slot.
        """
        if self._feedback.more:
            return True
        stops = self._feedback.stop is not None or self._rule.stops_groups
        pauses = self._lengths is not None or self.worker.admission.pauses
        return waits and (stops or pauses)

    def _unfinished(self, samples: Sequence[Sample]) -> list[Sample]:
        """What is still to be drawn; what is not is scored, unless it is."""
        finished = [sample for sample in samples if sample.completion.finished]
        for sample in finished:
            self._count(sample)
            if not sample.completion.scored:
                self.scorer.submit(sample.group, sample.completion)
        self._came_finished += finished
        return [sample for sample in samples if not sample.completion.finished]

    def _scored(self) -> Iterator[Group]:
        for group, completion in self.scorer.poll():
            if all(c is not completion for c in group.completions):
                continue  # the group had enough
            self._on_completion(completion)
            enough = self._rule.enough(group, self._state)
            if enough is not None:
                yield self._stop(group, enough)
            elif group.complete:
                yield self._complete(group)

    def _complete(self, group: Group) -> Group:
        self._on_group(group)
        another = self._feedback.more and self._feedback.more(group)
        if another:
            self._state.planned.append(another)
            self._state.completions += len(another.completions)
            self._undecoded[another.id] = len(another.completions)
            self._places[another.id] = len(self._places)
            self._submit(self._unfinished([Sample(another, c) for c in another.completions]))
        return group

    def _react(self, finished: Sequence[Sample]) -> Iterator[Group]:
        """What is to be done before the next step."""
        while samples := [*finished, *self._came_finished]:
            finished, self._came_finished = [], []
            yield from self._await(samples)
        yield from self._scored()
        yield from self._race()

    def _await(self, finished: Sequence[Sample]) -> Iterator[Group]:
        """Wait for the scores that change what decodes, and stop the groups that need no more."""
        stop, more = self._feedback.stop, self._feedback.more
        for group in {sample.group.id: sample.group for sample in finished}.values():
            decodes = self._undecoded[group.id] > 0
            if not (stop and stop.waits(group) if decodes else more):
                continue
            while not all(c.scored for c in group.completions if c.finished):
                self._wait()
                yield from self._scored()
            if stop and self._undecoded[group.id] and stop.stops(group):
                yield self._stop(group, [c for c in group.completions if c.finished])

    def _race(self) -> Iterator[Group]:
        """Wait for the scores of those that are ahead, while the round has patience left."""
        while self._state.patient and self._rule.awaits(self._state):
            self._patience -= self._wait(self._patience)
            self._state.patient = self._patience > 0
            yield from self._scored()

    def _wait(self, timeout: float | None = None) -> float:
        """Wait for a score, and count the seconds."""
        self._heed()
        began = time.perf_counter()
        self.scorer.wait(HEED_SECONDS if timeout is None else min(timeout, HEED_SECONDS))
        waited = time.perf_counter() - began
        self.waited += waited
        return waited

    def _stop(self, group: Group, kept: list[Completion]) -> Group:
        """Abort what still decodes of a group, and keep no more than is needed of the rest."""
        samples = {Sample(group, c).id: c for c in group.completions if not c.finished}
        self._take(self.worker.abort(samples.keys()))
        for request_id, completion in samples.items():
            del self._live[request_id]
            self._count(Sample(group, completion))
        self.scorer.cancel(group)
        chosen = {c.index for c in kept}
        others = [c for c in group.completions if c.index not in chosen]
        self._state.stopped.setdefault(group.id, []).extend(others)
        group.completions = kept
        return self._complete(group)

    def _count(self, sample: Sample) -> None:
        """One more is decoded."""
        self._undecoded[sample.group.id] -= 1
        self._state.completions_decoded += 1
        if sample.completion.finished:
            self._state.finished.setdefault(sample.group.id, []).append(sample.completion)
        if not self._undecoded[sample.group.id]:
            self._decoded_at[sample.group.id] = (
                self.worker.trace.decode_steps,
                self._places[sample.group.id],
            )
            insort(self._state.decoded, sample.group, key=lambda group: self._decoded_at[group.id])

    def _submit(self, samples: Sequence[Sample]) -> None:
        probe = self._probe
        requests = [
            Request(
                id=sample.id,
                prompt_ids=sample.group.prompt.token_ids,
                seed=completion_seed(
                    self.seed, sample.group, sample.completion, self._version, self._salt
                ),
                sampling=sample.group.sampling,
                prefix_ids=frozen(sample.completion.token_ids),
                pause_at=probe if len(sample.completion.token_ids) < probe else None,
            )
            for sample in samples
        ]
        self._live |= {r.id: (sample, r) for sample, r in zip(samples, requests, strict=True)}
        if self._lengths is not None:
            self._expect([r for r, q in zip(samples, requests, strict=True) if q.pause_at is None])
        self.worker.submit(self._live[r.id][1] for r in requests)

    def _expect(self, samples: Sequence[Sample]) -> None:
        """Write what is predicted of completions into their requests."""
        assert self._lengths is not None, "nobody predicts"
        for sample, expected in zip(samples, self._lengths.expect(samples), strict=True):
            request = self._live[sample.id][1]
            self._live[request.id] = sample, replace(request, expected=expected)

    def _take(self, events: Iterable[Event]) -> list[Sample]:
        """Take the events in; what has finished with them."""
        paused: list[Sample] = []
        finished: list[Sample] = []
        live, version = self._live, self._version
        for event in events:  # a turn for each token that is drawn
            sample = live[event.request_id][0]
            sample.completion.take(event, version)
            if event.finish_reason is not None:
                (paused if event.finish_reason == "paused" else finished).append(sample)
        if finished:
            # not in the order of slots, which depends on who was aborted when
            finished.sort(
                key=lambda sample: (self._places[sample.group.id], sample.completion.index)
            )
            self._finish(finished)
        if paused:
            self._go_on(paused)
        return finished

    def _finish(self, samples: Sequence[Sample]) -> None:
        lengths = self._lengths
        for sample in samples:
            del self._live[sample.id]
        if lengths is not None:
            lengths.observe(samples)
            if lengths.revises:
                self._revise(samples)
        for sample in samples:
            self._count(sample)
            completion = sample.completion
            if not all(map(math.isfinite, completion.logprobs)):
                completion.dropped = "nonfinite_logprob"
                self.drops[completion.dropped] += 1
            self.scorer.submit(sample.group, completion)

    def _revise(self, finished: Sequence[Sample]) -> None:
        """Predict the siblings that wait anew."""
        groups = {sample.group.id: sample.group for sample in finished}.values()
        waiting = []
        for sample in (Sample(group, c) for group in groups for c in group.completions):
            _, request = self._live.get(sample.id, (sample, None))
            drawn = len(sample.completion.token_ids)
            if request and request.pause_at is None and len(request.prefix_ids) == drawn:
                waiting.append(sample)
        self._expect(waiting)
        requests = (self._live[sample.id][1] for sample in waiting)
        self.worker.rekey({r.id: r.expected for r in requests if r.expected is not None})

    def _go_on(self, samples: Sequence[Sample]) -> None:
        """Submit what paused again, predicted if its probe is over."""
        probed = []
        for sample in samples:
            _, request = self._live[sample.id]
            drawn = len(sample.completion.token_ids)
            expected = request.expected
            if expected is not None:
                expected = max(1.0, expected - (drawn - len(request.prefix_ids)))
            request = replace(
                request, prefix_ids=frozen(sample.completion.token_ids), expected=expected
            )
            if request.pause_at is not None and drawn >= request.pause_at:
                request = replace(request, pause_at=None)
                probed.append(sample)
            self._live[request.id] = sample, request
        if probed:
            self._expect(probed)
        self.worker.submit(self._live[sample.id][1] for sample in samples)
