"""The completions of a rollout that the engine has, and what is asked of it for each."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.round_rule import RoundState
from lit_rlsched.types import Completion, Event, Group, Request, Sample, stable_hash


def completion_seed(
    run_seed: int, group: Group, completion: Completion, version: int, seed_domain: str = ""
) -> int:
    """Return a completion's seed; it depends neither on its time nor on other completions."""
    prompt, drawn = group.prompt.uid, len(completion.token_ids)
    return stable_hash(run_seed, seed_domain, prompt, completion.index, version, drawn)


class Requests:
    """Requests of completions that wait for a slot, decode, or are paused.

    A request that reaches its `pause_at` comes back from the engine: the predictor then estimates
    what is left of its completion.
    """

    def __init__(
        self,
        session: RolloutSession,
        state: RoundState,
        version: int,
        seed_domain: str,
        held_out: bool,
    ) -> None:
        self.live: dict[str, tuple[Sample, Request]] = {}
        """Completions that the engine has, by id."""
        self.probe = 0
        """Tokens after which a completion pauses."""
        self._session, self._state = session, state
        self._seed_domain, self._seed_version = seed_domain, 0 if held_out else version
        self._lengths = None if held_out else session.lengths
        self.paused: list[Sample] = []
        """What `take` has seen pause."""
        self._made_way: list[str] = []

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue completions for a slot."""
        session, requests = self._session, list[Request]()
        for sample in samples:
            group, completion = sample.group, sample.completion
            later = self._state.waits(sample)
            seed = session.seed, group, completion, self._seed_version, self._seed_domain
            probes = not later and len(completion.token_ids) < self.probe
            request = Request(
                id=sample.id,
                prompt_ids=group.prompt.token_ids,
                seed=completion_seed(*seed),
                sampling=group.sampling,
                prefix_ids=completion.token_ids[:],
                pause_at=self.probe if probes else None,
                later=later,
                returns=session.turns is not None and completion.drawn > 0,
            )
            self.live[sample.id] = sample, request
            requests.append(request)
        probed = zip(samples, requests, strict=True)
        self._expect([s for s, r in probed if r.pause_at is None and not r.later])
        session.worker.submit(self.live[request.id][1] for request in requests)

    def take(self, events: Iterable[Event]) -> list[Sample]:
        """Apply events to their completions; return those that finished, which the engine forgets.

        `resume` submits those that are paused.
        """
        finished: list[Sample] = []
        live = self.live
        for event in events:  # hot loop: one pass per drawn token
            sample = live[event.request_id][0]
            sample.completion.take(event, event.version)
            if event.finish_reason is not None:
                (self.paused if event.finish_reason == "paused" else finished).append(sample)
        for sample in finished:
            del live[sample.id]
        return finished

    def resume(self) -> None:
        """Submit paused completions again; predict those that have finished their probe."""
        samples, self.paused = self.paused, []
        probed = []
        for sample in samples:
            _, request = self.live[sample.id]
            drawn = len(sample.completion.token_ids)
            expected = request.expected
            if expected is not None:
                expected = max(1.0, expected - (drawn - len(request.prefix_ids)))
            request = replace(request, prefix_ids=sample.completion.token_ids[:], expected=expected)
            if request.pause_at is not None and drawn >= request.pause_at:
                request = replace(request, pause_at=None)
                probed.append(sample)
            self.live[request.id] = sample, request
        self._expect(probed)
        self._session.worker.submit(self.live[sample.id][1] for sample in samples)

    def _expect(self, samples: Sequence[Sample]) -> None:
        """Write predicted lengths into the requests."""
        if self._lengths is None or not samples:
            return
        for sample, expected in zip(samples, self._lengths.expect(samples), strict=True):
            waits = 0.0 if self._session.turns is None else self._lengths.waits(sample)
            request = replace(self.live[sample.id][1], expected=expected, waits=waits)
            self.live[request.id] = sample, request

    def make_way(self) -> list[Event]:
        """Take completions of later rounds out of their slots until `go_on`."""
        self._made_way = [name for name, (_, request) in self.live.items() if request.later]
        return self._session.worker.abort(self._made_way)

    def go_on(self) -> None:
        """Queue again what has made way, behind the others."""
        requests = []
        for name in self._made_way:
            sample, request = self.live[name]
            request = replace(request, prefix_ids=sample.completion.token_ids[:])
            self.live[name] = sample, request
            requests.append(request)
        self._session.worker.submit(requests)
