"""Load the trained weights into the engine and check that it decodes with them.

The check finds gross errors: another model, a matrix that was not loaded, layers in another order.
It cannot find one missed sync after a small update, which changes log-probs less than rounding does
in half precision.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.spec import EngineDied, EngineSpec, engine_name
from lit_rlsched.engines.weight_transfer import packed_weights
from lit_rlsched.engines.weights import PackedWeights, WeightSource
from lit_rlsched.ranks import Team
from lit_rlsched.settings import RunFailed
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.optimizers import not_finite
from lit_rlsched.training.policy import evaluating, named_adapters, named_weights, whole
from lit_rlsched.training.precision import ForwardContext
from lit_rlsched.types import Completion, Prompt, Request, Sampling, stable_hash

TOKENS = 8
"""Tokens drawn from each of two prompts at every sync."""
CONTEXT = 32
"""Last tokens of a prompt that they are drawn from: a longer prompt finds nothing more."""
TOLERANCE = 1e-4
"""Largest mean absolute difference of log-probs that counts as rounding in fp32."""
TOLERANCE_CUDA = 5e-3
"""The same on a GPU, whose kernels add in other orders: others report a root mean square of
2e-3."""
TOLERANCE_HALF = 0.05
REDRAWN = 256
"""Tokens of a second comparison after a larger difference, because in half precision single tokens
may differ by 0.2 and more without an error."""
MOST_OF_ONE = 1.0
"""Cap on the difference of a token. One wrong matrix changes a few tokens a lot and most tokens
little, so a median, or a mean without the largest, would not show it."""
SLACK = 2
"""Factor on the tolerance in the second comparison."""
LONGEST, WAVES = 128, 32
"""Maximum tokens per completion, and completions per prompt, of the second comparison."""


class PolicyReader(WeightSource):
    """Reads weights and log-probs of the policy; with several ranks, on all of them at once.

    With `enable_lora` the weights are the LoRA adapters alone.
    """

    def __init__(
        self,
        policy: nn.Module,
        forward_context: ForwardContext = nullcontext,
        team: Team | None = None,
        enable_lora: bool = False,
    ) -> None:
        self._policy = policy
        self._forward_context = forward_context
        self._team = team or Team()
        self._enable_lora = enable_lora

    @property
    def tasks(self) -> dict[str, Callable[..., Any]]:
        """The part of the other ranks when the leader reads."""
        return {
            "not_finite": self._not_finite,
            "weights": self._weights,
            "packed": self._packed,
            "logprobs": self._logprobs,
        }

    def weights(self) -> "PolicyReader":
        """Return all weights, or adapters alone, if every number of them is finite."""
        of_ranks = self._team.call("not_finite", self._not_finite)
        if wrong := sorted({name for of_rank in of_ranks for name in of_rank}):
            raise FloatingPointError(
                f"The trainer's weights are not finite: {len(wrong)} tensors hold NaN or infinity, "
                f"the first is `{wrong[0]}`. The engine is not the cause. Resume from an earlier "
                "checkpoint; a lower learning rate may help."
            )
        return self

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._team.iterate("weights", self._weights)

    def packed(self, dtype: torch.dtype) -> Generator[PackedWeights, None, None]:
        yield from self._team.iterate("packed", self._packed, dtype)

    def logprobs(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], temperature: float
    ) -> list[Tensor]:
        """Compute the log-probs of the tokens of each completion, in eval mode."""
        ids = [
            ([*prompt.token_ids], [*completion.token_ids])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return self._team.call("logprobs", self._logprobs, ids, temperature)

    def _not_finite(self) -> list[list[str]]:
        return self._team.all_gather(not_finite(self._policy, trained_only=self._enable_lora))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        named = named_adapters if self._enable_lora else named_weights
        return ((name, whole(weight)) for name, weight in named(self._policy))

    def _packed(self, dtype: torch.dtype) -> Iterator[PackedWeights]:
        return packed_weights(self._weights(), dtype, self._team)

    @torch.no_grad()
    def _logprobs(self, ids: list[tuple[list[int], list[int]]], temperature: float) -> list[Tensor]:
        device = next(self._policy.parameters()).device
        found = []
        with evaluating(self._policy), self._forward_context():
            for prompt, completion in ids:
                logp, _ = completion_logprobs(
                    self._policy,
                    torch.tensor([[*prompt, *completion]], device=device),
                    torch.tensor([len(prompt)], device=device),
                    torch.tensor([len(completion)], device=device),
                    temperature=temperature,
                )
                found.append(logp[0].cpu())
        return found


class WeightSync:
    """Loads the policy's weights into a started engine.

    After each sync, `probe` prompts are decoded at `temperature` to check the weights of each
    engine; without them there is no check. The engine was started with `spec`, whose `dtype` is the
    trainer's.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        policy: PolicyReader | nn.Module,
        *,
        probe: Sequence[Prompt] = (),
        temperature: float = 1.0,
    ) -> None:
        self._engine, self._spec = engine, spec
        if not isinstance(policy, PolicyReader):
            policy = PolicyReader(policy, enable_lora=engine.enable_lora)
        self._policy = policy
        ends = (replace(prompt, token_ids=prompt.token_ids[-CONTEXT:]) for prompt in probe)
        self._prompts = list(ends)[: spec.slots // len(engine.engines)]
        self._temperature = temperature

    def __call__(self, version: int) -> dict[str, float]:
        """Load the weights of `version`; return `sync/max_logp_diff` if they are checked."""
        self._engine.sync_weights(self._policy.weights(), version)
        while self._prompts:
            with suppress(EngineDied):  # its replacement has the weights, but not the requests
                return {"sync/max_logp_diff": self.check(version)}
        return {}

    def check(self, version: int) -> float:
        """Compare the log-probs of drawn tokens; return the largest difference of a token.

        Raises:
            RunFailed: If an engine does not decode with the trained weights.
        """
        drawn = self._engine.each(lambda engine: self._draw(engine, version, TOKENS))
        ours, theirs = self._spec.dtype, self._engine.cache_dtype(self._spec)
        largest = []
        for index, (engine, completions) in enumerate(
            zip(self._engine.engines, drawn, strict=True)
        ):
            gap = self._gap(completions)
            if not gap.mean() <= tolerance(ours, theirs, self._spec.device):
                gaps: list[Tensor] = []
                each = min(LONGEST, -(-REDRAWN // len(self._prompts)))
                while sum(map(len, gaps)) < REDRAWN and len(gaps) < WAVES:
                    gaps.append(self._gap(self._draw(engine, version, each, f"{len(gaps)}/")))
                gap = torch.cat(gaps)
                mean, allowed = robust_mean(gap), SLACK * tolerance(ours, theirs, self._spec.device)
                if not mean <= allowed:
                    name = engine_name(index, len(drawn)).capitalize()
                    raise RunFailed(
                        f"{name} does not decode with the weights that are trained: after the "
                        f"weight sync its log-probs differ from the trainer's by {mean:.2e} on "
                        f"average (of {len(gap)} tokens, each counted with {MOST_OF_ONE} at most; "
                        f"{allowed:.0e} allowed between {ours} and {theirs} on "
                        f"{self._spec.device.type}). Check that engine and trainer load the same "
                        "`model`, and the engine's version; `verify_sync=False` switches this "
                        "check off."
                    )
            largest.append(float(gap.max()))
        return max(largest)

    def _gap(self, drawn: Sequence[Completion]) -> Tensor:
        """Absolute differences of the tokens of all prompts, one after the other."""
        ours = self._policy.logprobs(self._prompts, drawn, self._temperature)
        return torch.cat(
            [
                (logp - torch.tensor(completion.logprobs, dtype=logp.dtype)).abs()
                for logp, completion in zip(ours, drawn, strict=True)
            ]
        )

    def _draw(
        self, engine: RolloutEngine, version: int, tokens: int, wave: str = ""
    ) -> list[Completion]:
        longest = max(len(prompt.token_ids) for prompt in self._prompts)
        tokens = min(tokens, self._spec.max_model_len - longest)
        sampling = Sampling(tokens, temperature=self._temperature)
        drawn = {f"sync-probe/{wave}{i}": Completion(i) for i in range(len(self._prompts))}
        engine.submit(
            [
                Request(name, prompt.token_ids, stable_hash(name, version), sampling)
                for name, prompt in zip(drawn, self._prompts, strict=True)
            ]
        )
        try:
            while any(c.finish_reason is None for c in drawn.values()):
                for event in engine.step():
                    drawn[event.request_id].take(event, version)
        finally:
            engine.abort(drawn)
        return list(drawn.values())


def tolerance(trainer: torch.dtype, engine: torch.dtype, device: torch.device) -> float:
    """Mean difference that rounding explains, given the coarser of the two precisions."""
    if min(trainer.itemsize, engine.itemsize) < torch.float32.itemsize:
        return TOLERANCE_HALF
    return TOLERANCE_CUDA if device.type == "cuda" else TOLERANCE


def robust_mean(gap: Tensor) -> float:
    """Mean of the differences capped at `MOST_OF_ONE`; NaN if one is not finite."""
    return float(gap.clamp(max=MOST_OF_ONE).mean()) if gap.isfinite().all() else float("nan")
