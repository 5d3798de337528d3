"""The rollout loop: engine events become completions, and their scores complete groups."""

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lit_rlsched.engines.rollout_worker import Worker
from lit_rlsched.rollout.scoring import Feedback, Scorer
from lit_rlsched.rollout.turns import Next, Turns
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule, RoundState
from lit_rlsched.types import Completion, Event, Group, Request, Sample, stable_hash

HEED_SECONDS = 0.5
"""Longest wait for a score before `heed` is called again."""


def completion_seed(
    run_seed: int, group: Group, completion: Completion, version: int, salt: str = ""
) -> int:
    """Return a completion's seed; it depends neither on its time nor on other completions."""
    return stable_hash(
        run_seed, salt, group.prompt.uid, completion.index, version, len(completion.token_ids)
    )


class RolloutController:
    """Decodes a round's groups until its rule ends the round, without torch or Lightning.

    With a length predictor every completion pauses after `probe_tokens` tokens. The predictor
    estimates the rest of it, and the admission orders waiting completions by the estimates. A pause
    changes no token. If every completion has a slot, none pauses.
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
        turns: Turns | None = None,
    ) -> None:
        self.worker = worker
        self.scorer = scorer
        self.seed = seed
        self.lengths = lengths
        self.probe_tokens = probe_tokens
        self.drops: Counter[str] = Counter()
        """Completions dropped since the run began, by reason."""
        self.waited = 0.0
        """Seconds for which this round stopped decoding to wait for scores."""
        self._progress = Progress([], patient=False)
        self._on_completion = on_completion
        self._on_group = on_group
        self._heed = heed
        self.turns = turns
        self._live: dict[str, tuple[Sample, Request]] = {}
        self._feedback = Feedback()
        self._rule: RoundRule = FullRound(0)

    @property
    def state(self) -> RoundState:
        """State of the current or last round, as its rule sees it."""
        return self._progress.state

    @property
    def waits_for_scores(self) -> bool:
        """Whether the round may stop decoding to wait for scores."""
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
        same_noise: bool = False,
    ) -> Iterator[Group]:
        """Decode and score the groups, and yield each group as it completes.

        Completions that are unfinished when the round ends keep the tokens drawn so far.
        """
        if self.turns is not None:
            self.turns.begin_round(self.worker.trace.decode_steps)
        self._salt, self._rule = salt, rule
        self._seed_version = 0 if same_noise else version
        self._patience = rule.patience or 0.0
        self._feedback, self.waited = feedback or Feedback(), 0.0
        self._lengths = lengths = self.lengths if predict else None
        if lengths is not None:
            lengths.start_round()
        samples = [Sample(g, c) for g in groups for c in g.completions]
        self._progress = Progress(groups, patient=rule.patience is not None)
        self.state.waiting = {group.id for group in rule.waiting(groups)}
        self._told: set[str] = set()
        """Ids of groups with which the hooks were called, if the rule `reorders`."""
        self._came_finished: list[Sample] = []
        self._complete_groups: list[Group] = []
        """Complete groups that `feedback.more` is not asked about yet."""
        try:
            samples = self._unfinished(samples)
            due = sum(not self._waits(sample) for sample in samples)
            waits = self.worker.may_wait(due)
            self._probe = self.probe_tokens if lengths is not None and waits else 0
            ahead = not self._intervenes(due, len(samples))
            self.worker.start_round(ahead=ahead, version=version)
            self._submit(sorted(samples, key=lambda sample: not sample.completion.token_ids))
            # others may still end in this step: by an early stop
            now = self.worker.trace.decode_steps
            self.state.final = sum(at < now for at, _ in self._progress.decoded_at.values())
            yield from self._react([])  # what came finished may already be enough
            turns = self.turns
            while (self._live or (turns and turns.pending)) and not rule.done(self.state):
                self._heed()
                events = self.worker.step() if self._live else []
                self.state.final = len(self.state.decoded)  # later groups are appended
                finished = self._take(events)
                if turns is not None:
                    finished = [*finished, *self._answered(turns)]
                yield from self._react(finished)
            self._take(self.worker.abort())
            self.state.patient = False
            races = rule.patience is not None
            while self.scorer.pending and not (races and rule.done(self.state)):
                self._heed()
                self.scorer.wait(HEED_SECONDS)
                yield from self._scored()
            yield from self._replace()
            if rule.reorders:
                self._tell(rule.settle(self.state.planned, self.state)[0])
        finally:
            self.worker.abort()
            self.scorer.cancel()
            self._live.clear()
            if self.turns is not None:
                self.turns.end_round()

    def _answered(self, turns: Turns) -> list[Sample]:
        """Let completions go on that environments have answered; return those that are over."""
        turns.note_free(self.worker.slots - len(self._live))
        while turns.must_wait(self.worker.trace.decode_steps, not self._live):
            self._heed()
            turns.wait(HEED_SECONDS)
            turns.note_free(self.worker.slots - len(self._live))
        over = self._go_on_as(turns.poll())
        self._finish(over)
        return over

    def _go_on_as(self, turned: Iterable[tuple[Sample, Next | None]]) -> list[Sample]:
        """Let completions decode or begin again; return those that are over."""
        over = []
        for sample, becomes in turned:
            if becomes == "over":
                over.append(sample)
                sample.completion.environment_state = ""
                if why := sample.completion.dropped:
                    self.drops[why] += 1
            elif becomes == "decodes":
                self._submit_begun([sample])
            elif becomes is not None:
                if becomes == "diverged":
                    self.drops["environment_diverged"] += 1
                    sample.completion.restart()
                self._submit([sample])
        return self._progress.sorted(over)

    def _waits(self, sample: Sample) -> bool:
        """Return whether a completion only uses a free slot in this round."""
        return sample.group.id in self.state.waiting

    def _tell(self, groups: Iterable[Group]) -> None:
        """Call the hooks with complete groups that this round is certain to train on."""
        for group in groups:
            if group.complete and group.id not in self._told:
                self._told.add(group.id)
                for completion in group.completions:
                    self._on_completion(completion)
                self._on_group(group)

    def _intervenes(self, due: int, completions: int) -> bool:
        """Return whether this loop may change, between two steps, what other completions decode.

        `due` of the completions do not only use free slots.
        """
        if self._feedback.more or (self.turns is not None and self.turns.tool_steps is not None):
            return True
        worker = self.worker
        if self._lengths is not None and worker.may_wait(due):
            return True
        stops = self._feedback.stop is not None or self._rule.stops_groups
        return worker.may_wait(completions) and (stops or worker.admission.budget is not None)

    def _unfinished(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return unfinished samples; submit finished ones to the scorer.

        Of a group that is partly done, the hooks have seen the completions that have their scores.
        """
        rule = self._rule
        partly = not rule.reorders and rule.verifies_from is None
        finished = [sample for sample in samples if sample.completion.finished]
        for sample in finished:
            self._count(sample)
            if self._waits(sample):
                continue
            self._came_finished.append(sample)
            if not (partly and sample.completion.scored):
                self.scorer.submit(sample.group, sample.completion)
        return [sample for sample in samples if not sample.completion.finished]

    def _scored(self) -> Iterator[Group]:
        for group, completion in self.scorer.poll():
            if any(c is completion for c in self.state.stopped.get(group.id, ())):
                continue  # the group was stopped without it
            if not self._rule.reorders:
                self._on_completion(completion)
            enough = self._rule.enough(group, self.state)
            if enough is not None:
                yield from self._stop(group, enough)
            elif group.complete:
                yield from self._complete(group)

    def _complete(self, group: Group) -> Iterator[Group]:
        """Yield a complete group, at once unless another may take its place."""
        if self._rule.reorders:
            self._tell(self._rule.final_groups(self.state))
            yield group
        elif self._feedback.more is None:
            self._on_group(group)
            yield group
        else:
            self._complete_groups.append(group)

    def _replace(self) -> Iterator[Group]:
        """Yield complete groups as they were decoded, and add those that take their places.

        The order in which scores come must not decide which prompts come next.
        """
        complete, self._complete_groups = self._complete_groups, []
        for group in sorted(complete, key=lambda group: self._progress.decoded_at[group.id]):
            self._on_group(group)
            if self._feedback.more and (another := self._feedback.more(group)):
                self._progress.add(another)
                others = self._make_way()
                self._submit(self._unfinished([Sample(another, c) for c in another.completions]))
                self.worker.submit(others)
            yield group

    def _make_way(self) -> list[Request]:
        """Take completions of later rounds out of their slots; they go on once others are free."""
        later = [name for name, (_, request) in self._live.items() if request.later]
        self._take(self.worker.abort(later))
        for name in later:
            sample, request = self._live[name]
            request = replace(request, prefix_ids=sample.completion.token_ids[:])
            self._live[name] = sample, request
        return [self._live[name][1] for name in later]

    def _react(self, finished: Sequence[Sample]) -> Iterator[Group]:
        """Do what must happen before the next step, and yield groups that complete."""
        while True:
            if samples := [*finished, *self._came_finished]:
                finished, self._came_finished = [], []
                yield from self._await(samples)
            yield from self._scored()
            while self.state.patient and self._rule.awaits(self.state):  # of groups that are ahead
                self._patience -= self._wait(self._patience)
                self.state.patient = self._patience > 0
                yield from self._scored()
            if self._complete_groups:
                yield from self._replace()
            if not self._came_finished:
                return

    def _await(self, finished: Sequence[Sample]) -> Iterator[Group]:
        """Wait for scores that change what decodes, and stop groups that need no more."""
        stop, more = self._feedback.stop, self._feedback.more
        due = {s.group.id: s.group for s in finished if not self._waits(s)}
        for group in due.values():
            decodes = self._progress.undecoded[group.id] > 0
            if not (stop and stop.waits(group) if decodes else more):
                continue
            while not all(c.scored for c in group.completions if c.finished):
                self._wait()
                yield from self._scored()
            if stop and self._progress.undecoded[group.id] and stop.stops(group):
                yield from self._stop(group, [c for c in group.completions if c.finished])

    def _wait(self, timeout: float | None = None) -> float:
        """Wait for a score and return the seconds it took."""
        self._heed()
        began = time.perf_counter()
        self.scorer.wait(HEED_SECONDS if timeout is None else min(timeout, HEED_SECONDS))
        waited = time.perf_counter() - began
        self.waited += waited
        return waited

    def _stop(self, group: Group, kept: list[Completion]) -> Iterator[Group]:
        """Abort the unfinished completions of a group, and keep only `kept`."""
        samples = {Sample(group, c).id: c for c in group.completions if not c.finished}
        self._take(self.worker.abort(samples.keys()))
        for request_id, completion in samples.items():
            self._live.pop(request_id, None)  # it may wait for its environment
            if self.turns is not None:
                self.turns.leave(Sample(group, completion))
            self._count(Sample(group, completion))
        self.scorer.cancel(group)
        self._progress.keep(group, kept)
        return self._complete(group)

    def _count(self, sample: Sample) -> None:
        """Record that a completion needs no more decoding."""
        self._progress.count(sample, self.worker.trace.decode_steps)

    def _submit(self, samples: Sequence[Sample]) -> None:
        """Submit completions, once their environments are there."""
        if self.turns is None:
            self._submit_begun(samples)
            return
        for sample in samples:
            self.turns.begin(sample)

    def _submit_begun(self, samples: Sequence[Sample]) -> None:
        probe, tools = self._probe, self.turns is not None
        requests = [
            Request(
                id=sample.id,
                prompt_ids=sample.group.prompt.token_ids,
                seed=completion_seed(
                    self.seed, sample.group, sample.completion, self._seed_version, self._salt
                ),
                sampling=sample.group.sampling,
                prefix_ids=sample.completion.token_ids[:],
                pause_at=None
                if self._waits(sample) or len(sample.completion.token_ids) >= probe
                else probe,
                later=self._waits(sample),
                returns=tools and sample.completion.drawn > 0,
            )
            for sample in samples
        ]
        self._live |= {r.id: (sample, r) for sample, r in zip(samples, requests, strict=True)}
        if self._lengths is not None:
            probed = zip(samples, requests, strict=True)
            self._expect([s for s, r in probed if r.pause_at is None and not r.later])
        self.worker.submit(self._live[r.id][1] for r in requests)

    def _expect(self, samples: Sequence[Sample]) -> None:
        """Write predicted lengths into the requests."""
        assert self._lengths is not None
        for sample, expected in zip(samples, self._lengths.expect(samples), strict=True):
            waits = 0.0 if self.turns is None else self._lengths.waits(sample)
            request = replace(self._live[sample.id][1], expected=expected, waits=waits)
            self._live[request.id] = sample, request

    def _take(self, events: Iterable[Event]) -> list[Sample]:
        """Apply events to their completions, and return the samples that finished."""
        paused: list[Sample] = []
        finished: list[Sample] = []
        live = self._live
        for event in events:  # hot loop: one pass per drawn token
            sample = live[event.request_id][0]
            sample.completion.take(event, event.version)
            if event.finish_reason is not None:
                (paused if event.finish_reason == "paused" else finished).append(sample)
        if finished:
            # the order of slots would depend on earlier aborts
            finished = self._progress.sorted(finished)
            if self.turns is not None:
                for sample in finished:
                    del live[sample.id]
                step = self.worker.trace.decode_steps
                finished = self._go_on_as((s, self.turns.ended(s, step)) for s in finished)
            self._finish(finished)
        if paused:
            self._go_on(paused)
        return finished

    def _finish(self, samples: Sequence[Sample]) -> None:
        lengths = self._lengths
        if self.turns is None:
            for sample in samples:
                del self._live[sample.id]
        due = [sample for sample in samples if not self._waits(sample)]
        if lengths is not None:
            lengths.observe([sample for sample in due if not sample.completion.dropped])
        for sample in samples:
            self._count(sample)
        for sample in due:
            completion = sample.completion
            if not all(map(math.isfinite, completion.logprobs)):
                completion.dropped = "nonfinite_logprob"
                self.drops[completion.dropped] += 1
            self.scorer.submit(sample.group, completion)

    def _go_on(self, samples: Sequence[Sample]) -> None:
        """Resume paused completions; predict those that have finished their probe."""
        probed = []
        for sample in samples:
            _, request = self._live[sample.id]
            drawn = len(sample.completion.token_ids)
            expected = request.expected
            if expected is not None:
                expected = max(1.0, expected - (drawn - len(request.prefix_ids)))
            request = replace(request, prefix_ids=sample.completion.token_ids[:], expected=expected)
            if request.pause_at is not None and drawn >= request.pause_at:
                request = replace(request, pause_at=None)
                probed.append(sample)
            self._live[request.id] = sample, request
        if probed:
            self._expect(probed)
        self.worker.submit(self._live[sample.id][1] for sample in samples)


class Progress:
    """Counts completions that need no more decoding, and ranks groups that have no others."""

    def __init__(self, groups: Sequence[Group], patient: bool) -> None:
        self.state = RoundState([], 0, patient=patient)
        self.undecoded: dict[str, int] = {}
        """Number of completions of each group that still decode."""
        self.decoded_at: dict[str, tuple[int, int]] = {}
        """Turn in which the last completion of a group was decoded, and the group's place."""
        self._places: dict[str, int] = {}
        for group in groups:
            self.add(group)

    def add(self, group: Group) -> None:
        """Add a group to the round, in the last place."""
        self.state.planned.append(group)
        self.state.completions += len(group.completions)
        self.undecoded[group.id] = len(group.completions)
        self._places[group.id] = len(self._places)

    def count(self, sample: Sample, turn: int) -> None:
        """Record that a completion needs no more decoding."""
        state, completion, name = self.state, sample.completion, sample.group.id
        left = self.undecoded[name] = self.undecoded[name] - 1
        state.completions_decoded += 1
        if completion.finished:
            state.finished.setdefault(name, []).append(completion)
        if not left:
            self.decoded_at[name] = turn, self._places[name]
            insort(state.decoded, sample.group, key=lambda group: self.decoded_at[group.id])

    def sorted(self, samples: Iterable[Sample]) -> list[Sample]:
        """Sort completions by the place of their group, and in it."""
        return sorted(samples, key=lambda s: (self._places[s.group.id], s.completion.index))

    def keep(self, group: Group, kept: list[Completion]) -> None:
        """Take all completions but `kept` out of a group that was stopped."""
        chosen = {c.index for c in kept}
        others = [c for c in group.completions if c.index not in chosen]
        self.state.stopped.setdefault(group.id, []).extend(others)
        group.completions = kept
