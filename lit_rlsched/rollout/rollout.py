"""The rollout of one round: engine events become completions, and their scores complete groups.

1. `Rollout(...)` takes the groups that the round decodes. Completions that are too old begin anew,
   tokens of earlier policies are verified.
2. `load_weights` gives the engine the weights of the round's policy.
3. `decode` submits completions, steps the engine, and scores what has finished. A group is complete
   once its completions are scored. The rule decides when the round ends; what is unfinished then
   keeps its tokens.
4. `result` splits the groups into those to train on and those that stay in the pool.

It needs neither torch nor Lightning: `fit`, validation and simulations run the same loop.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

from lit_rlsched.engines.devices import give_back
from lit_rlsched.rollout.hooks import RoundHooks
from lit_rlsched.rollout.requests import Requests
from lit_rlsched.rollout.result import (
    DraftAudit,
    RoundResult,
    give_back_results,
    put_off_old,
    restart_stale,
    split_round,
)
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.rollout.turns import Next, Turns
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule, RoundState
from lit_rlsched.scheduling.timeline import ENGINES, REWARDS, TRAINER, WEIGHTS
from lit_rlsched.types import Completion, Event, Group, Sample

POLL_SECONDS = 0.5
"""Longest wait for a score before an interrupt is looked for."""


class Rollout:
    """Draws the completions of one round; see the top of this file.

    With a length predictor every completion pauses after `probe_tokens` tokens. The predictor
    estimates the rest of it, and the admission orders waiting completions by the estimates. A pause
    changes no token. If every completion has a slot, none pauses.

    Args:
        session: Engine and scorer, started.
        rule: Ends the round; by default every group runs to its end.
        seed_domain: Part of every seed, to draw other noise for the same prompts and version.
        held_out: Whether the noise is the same in every version, and no lengths are predicted.
    """

    def __init__(
        self,
        session: RolloutSession,
        groups: Sequence[Group],
        version: int,
        rule: RoundRule | None = None,
        hooks: RoundHooks | None = None,
        seed_domain: str = "",
        held_out: bool = False,
    ) -> None:
        self.began = time.perf_counter()
        self.session, self.version = session, version
        self.rule = rule or FullRound(len(groups))
        self.hooks = hooks or RoundHooks()
        self.state = RoundState.begin(groups, self.rule)
        """What is decoded and scored so far, as the rule sees it."""
        self.trace = session.worker.trace
        """What ran when."""
        self._waited = 0.0  # seconds for which it stopped decoding to wait for scores
        self.ended: float | None = None
        """When the trainer ceased to wait for it, unless it ran beside the update."""
        self._lengths = None if held_out else session.lengths
        self._patience = self.rule.patience or 0.0
        self._requests = Requests(session, self.state, version, seed_domain, held_out)
        self._came_finished: list[Sample] = []
        self._complete: list[Group] = []
        """Complete groups that may still be replaced."""
        self._told: set[str] = set()
        """Ids of groups with which the hooks were called, if the rule `reorders`."""
        self._decoding: Generator[Group, None, None] | None = None
        self._awake = self._cancelled = False
        self._thread: futures.Future[None] | None = None
        self._check_interrupt = session.check_interrupt
        self._held: list[Callable[[], None]] | None = None
        """Hooks to call in `wait`, while the rollout runs beside the update."""
        self._drafts, self._verifying = DraftAudit(), 0.0
        self._stale: list[Any] = []
        old = self._discard(groups)
        self.hooks.planned(self.state)
        self._verify(groups, old)
        self._seconds = time.perf_counter() - self.began

    @property
    def decodes(self) -> bool:
        """Whether it decodes at this moment."""
        decoding = self._decoding
        here = decoding is not None and getgeneratorstate(decoding) == GEN_RUNNING
        return here or self._thread is not None

    def _discard(self, groups: Sequence[Group]) -> list[tuple[Completion, Completion]]:
        """Let completions begin anew that are too old; return the drafts, and what they were."""
        old = put_off_old(groups, self.version, self.rule)
        self._stale += restart_stale(groups, self.version, self.rule)
        return old

    def _verify(
        self, groups: Sequence[Group], old: Sequence[tuple[Completion, Completion]]
    ) -> None:
        """Verify drafts. A completion that keeps all its tokens keeps what followed from them."""
        if not old:
            return
        began = time.perf_counter()
        with self.session.timeline.doing("verify", TRAINER):
            self._drafts += self.hooks.verify(groups, self.version)
        self._verifying += time.perf_counter() - began
        give_back_results(old)

    # From the weights to the result.

    def load_weights(self) -> None:
        """Give the engine the weights of `version`; the trainer may change its own afterwards."""
        session, began = self.session, time.perf_counter()
        session.begin(self)
        self._failures = session.failures()
        give_back(session.spec.device)
        session.engine.wake()
        self._awake = True
        try:
            with session.timeline.doing(WEIGHTS, TRAINER, ENGINES):
                self._synced = session.sync(self.version)
            self.trace = session.worker.start_trace()
        except BaseException:
            self._sleep()
            raise
        self._seconds += time.perf_counter() - began

    def run(self) -> None:
        """Decode until the round ends; meanwhile the trainer uses what is ready."""
        for _ in self.decode():
            self.hooks.advanced(self.state, self.trace)

    def run_beside(self) -> None:
        """Run in a thread of its own until `wait`; hooks are called there."""
        self._held, self._check_interrupt = [], self._check_cancelled
        threads = futures.ThreadPoolExecutor(1, "rollout")
        self._thread = threads.submit(self.run)
        threads.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for a rollout beside the update; its exception is raised here."""
        thread, held = self._thread, self._held
        if thread is None or held is None:
            return
        try:
            with self.session.timeline.doing("rollout", TRAINER, waits_for=ENGINES):
                futures.wait([thread])
        except BaseException:  # a second Ctrl-C
            self._cancelled = True
            raise
        self._thread = self._held = None
        thread.result()
        for hook in held:
            hook()

    def cancel(self) -> None:
        """End the rollout before its next step."""
        self._cancelled = True
        if self._thread is not None:
            futures.wait([self._thread])
        try:
            if self._decoding is not None:
                self._decoding.close()
        finally:
            self._sleep()

    def result(self) -> RoundResult:
        """Split the decoded round into groups to train on and groups that stay in the pool."""
        result = split_round(self.state, self.rule, self._stale)
        result.trace, result.drafts = self.trace, self._drafts
        result.failures, result.metrics = self._failures, self._metrics
        if self._drafts.tokens:
            result.metrics["time/drafts"] = self._verifying
        if (control_tokens := self.session.control_tokens) is not None:
            result.metrics |= control_tokens.of_prompts(group.prompt for group in self.state.due)
        result.metrics["time/rollout"] = self._seconds
        return result

    def decode(self) -> Generator[Group, None, None]:
        """Decode and score the groups until the rule ends the round; yield those that complete."""
        self._decoding = self._decode()
        return self._decoding

    def _decode(self) -> Generator[Group, None, None]:
        session, rule, state = self.session, self.rule, self.state
        worker, scorer, turns = session.worker, session.scorer, session.turns
        live, start, ended = self._requests.live, session.timeline.now(), False
        try:
            self._begin()
            yield from self._react([])  # what came finished may already be enough
            while (live or (turns and turns.pending)) and not rule.done(state):
                self._check_interrupt()
                events = worker.step() if live else []
                if state.final < len(state.decoded):  # later groups are appended
                    state.final = len(state.decoded)
                    self.hooks.advanced(state, self.trace)  # their scores may have come before
                finished = self._take(events)
                if turns is not None:
                    finished = [*finished, *self._answered(turns)]
                if finished or scorer.pending or state.patient:  # not in most steps
                    yield from self._react(finished)
            self._take(worker.abort())
            state.patient = False
            while scorer.pending and not (rule.patience is not None and rule.done(state)):
                self._wait_for_score()
                yield from self._scored()
            yield from self._replace()
            if rule.reorders:
                self._tell(rule.split(state.planned, state)[0])
            ended = True
        finally:
            try:
                worker.abort()
                scorer.cancel()
                live.clear()
                if turns is not None:
                    turns.end_round(keep=ended and rule.keeps_unfinished)
            finally:
                self._ended(start)
        self._metrics = self._measure()
        self._failures = session.failures() - self._failures
        self._seconds += session.timeline.now() - start

    def _ended(self, start: float) -> None:
        """Put the engine to sleep, and tell the timeline what it did since `start`."""
        timeline = self.session.timeline
        if not self.session.engine.virtual_clock:
            timeline.add_trace(self.trace)
        if self._held is None:
            self.ended = timeline.now()
            timeline.add(TRAINER, "rollout", start, self.ended, ENGINES)
        self._sleep()

    def _sleep(self) -> None:
        if self._awake:
            self._awake = False
            self.session.engine.sleep()

    def _check_cancelled(self) -> None:
        """Raise if the rollout is to stop: in a thread of its own only `cancel` stops it."""
        if self._cancelled:
            raise futures.CancelledError

    def _call(self, hook: Callable[[Any], None], of: Any) -> None:
        """Call a hook of the trainer, now or in `wait`."""
        if self._held is None:
            hook(of)
        else:
            self._held.append(partial(hook, of))

    def _measure(self) -> dict[str, float]:
        """Return the metrics that do not follow from the trace."""
        session, metrics = self.session, dict[str, float]()
        if self._lengths is not None:
            metrics |= self._lengths.end_round()
        if self.hooks.stop or self.hooks.replaces or self.rule.patience is not None:
            metrics["rollout/score_wait_seconds"] = self._waited
        if session.turns is not None:
            metrics |= session.turns.metrics(self.trace.seconds * self.trace.slots)
        return metrics | session.worker.metrics() | dict(self._synced)

    # Decoding.

    def _begin(self) -> None:
        """Submit what has to be decoded, and what is finished already to the scorer."""
        session, state, worker = self.session, self.state, self.session.worker
        if self._lengths is not None:
            self._lengths.start_round()
        samples = self._unfinished([Sample(g, c) for g in state.planned for c in g.completions])
        if session.turns is not None:
            session.turns.begin_round(samples)
        due = sum(not self.state.waits(sample) for sample in samples)
        waits = worker.may_wait(due)
        self._requests.probe = session.probe_tokens if self._lengths is not None and waits else 0
        worker.start_round(ahead=not self._intervenes(due, len(samples)), version=self.version)
        self._submit(sorted(samples, key=lambda sample: not sample.completion.token_ids))

    def _intervenes(self, due: int, completions: int) -> bool:
        """Return whether this loop may change, between two steps, what other completions decode.

        `due` of the completions do not only use free slots.
        """
        worker, turns = self.session.worker, self.session.turns
        rewards_decide = self.hooks.replaces or self.hooks.pilot
        if rewards_decide or (turns is not None and turns.tools.tool_steps is not None):
            return True
        if self._lengths is not None and worker.may_wait(due):
            return True
        stops = self.hooks.stop is not None or self.rule.stops_groups
        return worker.may_wait(completions) and (stops or worker.admission.budget is not None)

    def _unfinished(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return unfinished samples; submit finished ones to the scorer.

        Of a group that is partly done, the hooks have seen the completions that have their scores.
        """
        partly = not self.rule.reorders and self.rule.verifies_from is None
        for sample in (s for s in samples if s.completion.finished):
            self.state.count(sample, self.trace.decode_steps)
            if self.state.waits(sample):
                continue
            self._came_finished.append(sample)
            if not (partly and sample.completion.scored):
                self.session.scorer.submit(sample.group, sample.completion)
        rest = [sample for sample in samples if not sample.completion.finished]
        pilot = self.hooks.pilot
        return [s for s in rest if not pilot or s.completion.index < pilot or s.group.begun(pilot)]

    def _submit(self, samples: Sequence[Sample]) -> None:
        """Submit completions, once their environments are there."""
        if self.session.turns is None:
            self._requests.submit(samples)
            return
        for sample in samples:
            self.session.turns.begin(sample)

    def _take(self, events: Iterable[Event]) -> list[Sample]:
        """Apply events to their completions, and return the samples that finished."""
        turns, finished = self.session.turns, self._requests.take(events)
        if finished:
            # the order of slots would depend on earlier aborts
            finished = self.state.in_order(finished)
            if turns is not None:
                step = self.trace.decode_steps
                finished = self._go_on_as((s, turns.ended(s, step)) for s in finished)
            self._finish(finished)
        if self._requests.paused:
            self._requests.resume()
        return finished

    def _finish(self, samples: Sequence[Sample]) -> None:
        """Count completions that are decoded, learn from them, and submit them to the scorer."""
        due = [sample for sample in samples if not self.state.waits(sample)]
        if self._lengths is not None:
            self._lengths.observe([sample for sample in due if not sample.completion.dropped])
        for sample in samples:
            self.state.count(sample, self.trace.decode_steps)
        for sample in due:
            completion = sample.completion
            if not all(map(math.isfinite, completion.logprobs)):
                completion.dropped = "nonfinite_logprob"
                self.session.drops[completion.dropped] += 1
            self.session.scorer.submit(sample.group, completion)

    def _answered(self, turns: Turns) -> list[Sample]:
        """Let completions go on that environments have answered; return those that are over."""
        worker = self.session.worker
        turns.note_free(worker.slots - len(self._requests.live))
        while turns.must_wait(self.trace.decode_steps, not self._requests.live):
            self._check_interrupt()
            turns.wait(POLL_SECONDS)
            turns.note_free(worker.slots - len(self._requests.live))
        over = self._go_on_as(turns.poll())
        self._finish(over)
        return over

    def _go_on_as(self, answered: Iterable[tuple[Sample, Next | None]]) -> list[Sample]:
        """Let completions decode or begin again; return those that are over."""
        over = []
        for sample, becomes in answered:
            if becomes == "over":
                over.append(sample)
                sample.completion.environment_state = ""
                if why := sample.completion.dropped:
                    self.session.drops[why] += 1
            elif becomes == "decodes":
                self._requests.submit([sample])
            elif becomes is not None:
                if becomes == "diverged":
                    self.session.drops["environment_diverged"] += 1
                    sample.completion.restart()
                self._submit([sample])
        return self.state.in_order(over)

    # Scores.

    def _react(self, finished: Sequence[Sample]) -> Iterator[Group]:
        """Do what must happen before the next step, and yield groups that complete."""
        while True:
            if samples := [*finished, *self._came_finished]:
                finished, self._came_finished = [], []
                yield from self._await(samples)
            yield from self._scored()
            while self.state.patient and self.rule.awaits(self.state):  # of groups that are ahead
                self._patience -= self._wait_for_score(self._patience, stops=True)
                self.state.patient = self._patience > 0
                yield from self._scored()
            if self._complete:
                yield from self._replace()
            if not self._came_finished:
                return

    def _await(self, finished: Sequence[Sample]) -> Iterator[Group]:
        """Wait for scores that change what decodes, and stop groups that need no more."""
        stop, undecoded = self.hooks.stop, self.state.undecoded
        due = {s.group.id: s.group for s in finished if not self.state.waits(s)}
        for group in due.values():
            decodes = undecoded[group.id] > 0
            if not (stop and stop.waits(group) if decodes else self.hooks.replaces):
                continue
            while not all(c.scored for c in group.completions if c.finished):
                self._wait_for_score(stops=True)
                yield from self._scored()
            if stop and undecoded[group.id] and stop.stops(group):
                yield from self._stop(group, [c for c in group.completions if c.finished])
            elif decodes and (pilot := self.hooks.pilot):
                self._submit_first([Sample(group, c) for c in group.completions[pilot:]])

    def _wait_for_score(self, most: float = POLL_SECONDS, stops: bool = False) -> float:
        """Wait for a score and return the seconds it took; `stops`: instead of decoding."""
        self._check_interrupt()
        timeline, began = self.session.timeline, self.session.timeline.now()
        if self.session.scorer.wait(min(most, POLL_SECONDS)):
            who = TRAINER if self._held is None else ENGINES
            timeline.add(who, "rewards", began, timeline.now(), REWARDS)
        waited = timeline.now() - began
        self._waited += waited if stops else 0.0
        return waited

    def _scored(self) -> Iterator[Group]:
        """Take the scores that have come, and yield groups that complete."""
        for group, completion in self.session.scorer.poll():
            if any(c is completion for c in self.state.stopped.get(group.id, ())):
                continue  # the group was stopped without it
            if not self.rule.reorders:
                self._call(self.hooks.completion_ended, completion)
            enough = self.rule.enough(group, self.state)
            if enough is not None:
                yield from self._stop(group, enough)
            elif group.complete:
                yield from self._completed(group)

    def _stop(self, group: Group, kept: list[Completion]) -> Iterator[Group]:
        """Abort the unfinished completions of a group, and keep only `kept`."""
        samples = [Sample(group, c) for c in group.completions if not c.finished]
        self._take(self.session.worker.abort([sample.id for sample in samples]))
        for sample in samples:
            self._requests.live.pop(sample.id, None)  # it may wait for its environment
            if self.session.turns is not None:
                self.session.turns.leave(sample)
            self.state.count(sample, self.trace.decode_steps)
        self.session.scorer.cancel(group)
        self.state.keep(group, kept)
        return self._completed(group)

    def _completed(self, group: Group) -> Iterator[Group]:
        """Yield a complete group, at once unless another may take its place."""
        if self.rule.reorders:
            self._tell(self.rule.final_groups(self.state))
            yield group
        elif self.hooks.replaces:
            self._complete.append(group)
        else:
            self._call(self.hooks.group_ended, group)
            yield group

    def _tell(self, groups: Iterable[Group]) -> None:
        """Call the hooks with complete groups that this round is certain to train on."""
        for group in groups:
            if group.complete and group.id not in self._told:
                self._told.add(group.id)
                for completion in group.completions:
                    self._call(self.hooks.completion_ended, completion)
                self._call(self.hooks.group_ended, group)

    def _replace(self) -> Iterator[Group]:
        """Yield complete groups as they were decoded, and add those that take their places.

        The order in which scores come must not decide which prompts come next.
        """
        complete, self._complete = self._complete, []
        for group in sorted(complete, key=lambda group: self.state.decoded_at[group.id]):
            self._call(self.hooks.group_ended, group)
            if (another := self.hooks.another(group, self.state)) is not None:
                self.state.add(another)
                self._verify([another], self._discard([another]))
                samples = [Sample(another, c) for c in another.completions]
                self._submit_first(self._unfinished(samples))
            yield group

    def _submit_first(self, samples: Sequence[Sample]) -> None:
        """Submit completions before those that only use free slots."""
        self._take(self._requests.make_way())
        self._submit(samples)
        self._requests.go_on()
