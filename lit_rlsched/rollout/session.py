"""Engine, rewards and controller of one run, kept in step with the policy that is trained."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from inspect import GEN_RUNNING, getgeneratorstate

import torch
from torch import nn

from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.engines.process import EngineDied, ProcessEngine
from lit_rlsched.finite import check_weights
from lit_rlsched.logprobs import completion_logprobs
from lit_rlsched.policy import named_weights
from lit_rlsched.rollout.controller import Feedback, RolloutController
from lit_rlsched.rollout.remote import make_worker
from lit_rlsched.rollout.scoring import Scorer
from lit_rlsched.rollout.trace import RolloutTrace
from lit_rlsched.rollout.types import Completion, Group, Prompt, Request, Sampling, stable_hash
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.rounds import FullRound, RoundPolicy

PROBE_TOKENS = 8
"""Tokens drawn from each of two prompts to compare the engine's weights with the trainer's."""
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Mean absolute difference of log-probs above which the weights are taken to be different ones."""
PROBE_TOLERANCE_HALF = 0.05


class RolloutSession:
    """Draws and scores completions under the weights of the moment.

    Args:
        engine: An engine that was not started yet; the session starts and closes it.
        spec: What the engine needs to know.
        admission: Makes, each time the engine has started, what decides which request takes a free
            slot.
        scorer: Scores finished completions.
        policy: The model that is trained.
        seed: The run's seed.
        probe: Two prompts for the check after each weight sync; none switches it off.
        probe_temperature: The temperature they are drawn at.
        forward_context: The Trainer's precision context for the trainer's side of that check.
        lengths: See `RolloutController`.
        probe_tokens: See `RolloutController`.
        on_completion: See `RolloutController`.
        on_group: See `RolloutController`.
        heed: See `RolloutController`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        admission: Callable[[], Admission],
        scorer: Scorer,
        policy: nn.Module,
        *,
        seed: int,
        probe: Sequence[Prompt] = (),
        probe_temperature: float = 1.0,
        forward_context: Callable[[], AbstractContextManager] = nullcontext,
        lengths: CalibratedPredictor | None = None,
        probe_tokens: int = 0,
        on_completion: Callable[[Completion], None] = lambda completion: None,
        on_group: Callable[[Group], None] = lambda group: None,
        heed: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.policy = policy
        self.scorer = scorer
        self.max_logp_diff: float | None = None
        """Largest difference the last probe saw."""
        self._probe = list(probe)[: spec.slots]
        self._probe_temperature = probe_temperature
        self._forward_context = forward_context
        self._admission = admission
        self._rollout: Generator[Group, None, None] = (g for g in list[Group]())
        try:
            engine.start(spec)
            worker = make_worker(engine, admission())
        except BaseException:
            engine.close()  # nobody else knows that it may have begun
            raise
        self.controller = RolloutController(
            worker,
            scorer,
            seed=seed,
            lengths=lengths,
            probe_tokens=probe_tokens,
            on_completion=on_completion,
            on_group=on_group,
            heed=heed,
        )

    @property
    def trace(self) -> RolloutTrace:
        """What ran when, in the last or current rollout."""
        return self.controller.worker.trace

    def failures(self) -> Counter[str]:
        """What went wrong with single completions until now, validation included."""
        drops = {f"dropped/{why}": count for why, count in self.controller.drops.items()}
        return Counter(drops | self.scorer.scheduler.counters())

    def metrics(self) -> dict[str, float]:
        """What the last rollout met beside its trace: waits, restarts, the last probe."""
        figures: dict[str, float] = {}
        if self.controller.waits_for_scores:
            figures["rollout/score_wait_seconds"] = self.controller.waited
        if isinstance(self.engine, ProcessEngine):
            figures["rollout/engine_restarts"] = self.engine.restarts
            figures["rollout/ahead_steps"] = self.controller.worker.ahead_steps
        if self.max_logp_diff is not None:
            figures["sync/max_logp_diff"] = self.max_logp_diff
        return figures

    def rollout(
        self,
        groups: Sequence[Group],
        version: int,
        policy: RoundPolicy | None = None,
        salt: str = "",
        predict: bool = False,
        feedback: Feedback | None = None,
    ) -> Generator[Group, None, None]:
        """Bring the engine to the weights of `version`, run `groups`, yield them as they complete.

        `salt`, `predict` and `feedback` are those of `RolloutController.run`. A rollout that was
        not run to its end is dropped when the next one starts.
        """
        self._rollout.close()
        policy = policy or FullRound(len(groups))
        self._rollout = self._run(
            version, self.controller.run(groups, policy, version, salt, predict, feedback)
        )
        return self._rollout

    def _run(self, version: int, groups: Iterator[Group]) -> Generator[Group, None, None]:
        self.engine.wake()
        try:
            self.sync(version)
            self.controller.worker.start_trace()
            yield from groups
        finally:
            self.engine.sleep()

    def restart(self, tensor_parallel_size: int) -> None:
        """Start the engine anew, with its model split over so many devices.

        Between rollouts only; one that was not run to its end is dropped. What waits is in the
        pool, and the weights come with the next rollout, so nothing else is lost.

        Raises:
            RuntimeError: a rollout waits for the caller, as in `on_completion_end`.
            ValueError: the engine does not start like that, or has too little cache for the slots.
        """
        if getgeneratorstate(self._rollout) == GEN_RUNNING:
            raise RuntimeError(
                "The engine cannot start anew inside a rollout. Do it in `on_round_start` or "
                "`on_round_end`."
            )
        self._rollout.close()
        self.engine.close()
        self.engine.tensor_parallel_size = tensor_parallel_size
        self.engine.start(self.spec)
        self.controller.worker = make_worker(self.engine, self._admission())

    def sync(self, version: int) -> None:
        """Load the policy's weights into the engine and check that it has them.

        Before every rollout, also under the same version: a callback may have swapped weights for
        validation and back.

        Raises:
            FloatingPointError: a weight is NaN or infinite: no engine gets it.
        """
        check_weights(self.policy)
        self.engine.sync_weights(named_weights(self.policy), version)
        while self._probe:
            with suppress(EngineDied):  # the next one has the weights, and not the probes
                return self._verify(version)

    @torch.no_grad()
    def _verify(self, version: int) -> None:
        """Draw a few tokens and compare their log-probs with the trainer's.

        Raises:
            RuntimeError: the engine does not decode with the weights that are trained.
        """
        drawn = self._draw_probe(version)
        device = next(self.policy.parameters()).device
        training = self.policy.training
        self.policy.eval()
        differences = []
        with self._forward_context():
            for prompt, completion in zip(self._probe, drawn, strict=True):
                logp, _ = completion_logprobs(
                    self.policy,
                    torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=device),
                    torch.tensor([len(prompt.token_ids)], device=device),
                    torch.tensor([len(completion.token_ids)], device=device),
                    temperature=self._probe_temperature,
                )
                theirs = torch.tensor(completion.logprobs, dtype=logp.dtype)
                differences.append((logp[0].cpu() - theirs).abs())
        self.policy.train(training)
        gap = torch.cat(differences)
        self.max_logp_diff = float(gap.max())
        tolerance = PROBE_TOLERANCE.get(self.spec.dtype, PROBE_TOLERANCE_HALF)
        if not gap.mean() <= tolerance:
            raise RuntimeError(
                f"After the weight sync the engine's log-probs differ from the trainer's by "
                f"{gap.mean():.2e} on average ({self.max_logp_diff:.2e} at most; {tolerance:.0e} "
                f"allowed in {self.spec.dtype}): it does not decode with the weights that are "
                "trained. Check that engine and trainer load the same `model`, and the engine's "
                "version; `verify_sync=False` switches this check off."
            )

    def _draw_probe(self, version: int) -> list[Completion]:
        longest = max(len(prompt.token_ids) for prompt in self._probe)
        tokens = min(PROBE_TOKENS, self.spec.max_model_len - longest)
        sampling = Sampling(tokens, temperature=self._probe_temperature)
        drawn = {f"sync-probe/{i}": Completion(i) for i in range(len(self._probe))}
        self.engine.submit(
            [
                Request(name, prompt.token_ids, stable_hash(name, version), sampling)
                for name, prompt in zip(drawn, self._probe, strict=True)
            ]
        )
        try:
            while any(c.finish_reason is None for c in drawn.values()):
                for event in self.engine.step():
                    drawn[event.request_id].take(event, version)
        finally:
            self.engine.abort(drawn)
        return list(drawn.values())

    def close(self) -> None:
        """Free the engine and the reward workers, whatever else goes wrong."""
        with ExitStack() as stack:
            stack.callback(self.scorer.scheduler.close)
            stack.callback(self.engine.close)
            stack.callback(self._rollout.close)
