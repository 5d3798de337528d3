"""The only loop: events from the engine, tokens into completions, scores into groups."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.types import Completion, Event, Group, Request, stable_hash
from lit_rlsched.rollout.worker import RolloutWorker
from lit_rlsched.scheduling.rounds import RoundPolicy, RoundState


def completion_seed(
    run_seed: int, group: Group, completion: Completion, version: int, salt: str = ""
) -> int:
    """The seed of one completion: a function of what it is, never of when or with whom it runs."""
    return stable_hash(
        run_seed, salt, group.prompt.uid, completion.index, version, len(completion.token_ids)
    )


class RolloutController:
    """Runs a round's groups to the end its policy defines. Knows nothing of torch or Lightning.

    Args:
        worker: Engine and admission.
        scorer: Turns finished completions into scores while others still decode.
        seed: The run's seed.
        on_completion: Called with each completion once its scores are there.
        on_group: Called with each group once all of its completions are scored.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        scorer: Scorer,
        *,
        seed: int,
        on_completion: Callable[[Completion], None] = lambda completion: None,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.worker = worker
        self.scorer = scorer
        self.seed = seed
        self.drops: Counter[str] = Counter()
        """Completions dropped, by reason, since the run began."""
        self._on_completion = on_completion
        self._on_group = on_group
        self._live: dict[str, tuple[Group, Completion]] = {}
        self._version = 0

    def run(
        self, groups: Sequence[Group], policy: RoundPolicy, version: int, salt: str = ""
    ) -> Iterator[Group]:
        """Draw what the groups lack and yield each group as it completes.

        Args:
            groups: The round's groups; completions with tokens are resumed after those.
            policy: Says when the round is over; what is unfinished then is aborted.
            version: Policy version of the engine's weights.
            salt: Keeps the seeds of another use of the same prompts (validation) apart.
        """
        self._version = version
        state = RoundState(groups_planned=len(groups))
        self.worker.submit(self._request(g, c, salt) for g in groups for c in g.completions)
        try:
            while not policy.done(state):
                if self.worker.busy:
                    for event in self.worker.step():
                        self._take(event)
                else:
                    self.scorer.wait()
                for group, completion in self.scorer.poll():
                    self._on_completion(completion)
                    if group.complete:
                        state.groups_complete += 1
                        self._on_group(group)
                        yield group
        finally:
            self.worker.abort()
            self.scorer.cancel()
            self._live.clear()

    def _request(self, group: Group, completion: Completion, salt: str) -> Request:
        request = Request(
            id=f"{group.id}/{completion.index}",
            prompt_ids=group.prompt.token_ids,
            seed=completion_seed(self.seed, group, completion, self._version, salt),
            sampling=group.sampling,
            prefix_ids=tuple(completion.token_ids),
        )
        self._live[request.id] = (group, completion)
        return request

    def _take(self, event: Event) -> None:
        group, completion = self._live[event.request_id]
        completion.take(event, self._version)
        if event.finish_reason is not None:
            del self._live[event.request_id]
            if not all(map(math.isfinite, completion.logprobs)):
                completion.dropped = "nonfinite_logprob"
                self.drops[completion.dropped] += 1
            self.scorer.submit(group, completion)
