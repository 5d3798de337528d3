"""The check after each weight sync that the engine decodes with the weights that are trained.

It finds what is grossly wrong: another model, a matrix that was not loaded, layers in another
order. A sync that is missed once, by weights that hardly moved, differs by less than rounding does
in half precision.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.types import Completion, Prompt, Request, Sampling, stable_hash

TOKENS = 8
"""Drawn from each of two prompts at every sync."""
TOLERANCE = 1e-4
"""Mean absolute difference of log-probs in fp32 above which the weights are taken to be others."""
TOLERANCE_CUDA = 5e-3
"""The same on a GPU, where kernels add up in other orders: others report a root mean square of
2e-3."""
TOLERANCE_HALF = 0.05
REDRAWN = 256
"""Tokens that decide where the first few differ by more: in half precision a run that is in order
has single tokens that are off by 0.2 and more."""
MOST_OF_ONE = 1.0
"""What each of them counts at most. One matrix that is not the trainer's throws a few tokens far
off and leaves most alone, so that a median, or a mean without the largest, would not see it."""
SLACK = 2
"""How many times the tolerance their mean may be."""
LONGEST, WAVES = 128, 32
"""Most tokens of one completion, and completions of each prompt, to get so many."""


class SyncProbe:
    """Draws a few tokens from the engine and compares their log-probs with the trainer's.

    Args:
        engine: The engine, once it has started.
        spec: What it was started with; `dtype` is the precision that the trainer computes in.
        policy: The model that is trained.
        prompts: What is drawn from, one request each at a time.
        temperature: The temperature they are drawn at.
        forward_context: The Trainer's precision context.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        policy: nn.Module,
        prompts: Sequence[Prompt],
        temperature: float,
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._engine, self._spec, self._policy = engine, spec, policy
        self._prompts = prompts
        self._temperature = temperature
        self._forward_context = forward_context

    def check(self, version: int) -> float:
        """Compare under the weights of `version`.

        Returns:
            The largest difference of a token's log-probs.

        Raises:
            RuntimeError: the engine does not decode with the weights that are trained.
        """
        ours, theirs = self._spec.dtype, self._engine.cache_dtype(self._spec)
        allowed = tolerance(ours, theirs, self._spec.device)
        gap = self._gap(version, TOKENS)
        if gap.mean() <= allowed:
            return float(gap.max())
        gap = self._larger_gap(version)
        mean, allowed = robust_mean(gap), SLACK * allowed
        if not mean <= allowed:
            raise RuntimeError(
                f"After the weight sync the engine's log-probs differ from the trainer's by "
                f"{mean:.2e} on average (of {len(gap)} tokens, {MOST_OF_ONE} at most of each; "
                f"{allowed:.0e} allowed between {ours} and {theirs} on {self._spec.device.type}): "
                "it does not decode with the weights that are trained. Check that engine and "
                "trainer load the same `model`, and the engine's version; `verify_sync=False` "
                "switches this check off."
            )
        return float(gap.max())

    def _larger_gap(self, version: int) -> Tensor:
        each = min(LONGEST, -(-REDRAWN // len(self._prompts)))
        gaps: list[Tensor] = []
        while sum(map(len, gaps)) < REDRAWN and len(gaps) < WAVES:
            gaps.append(self._gap(version, each, f"{len(gaps)}/"))
        return torch.cat(gaps)

    @torch.no_grad()
    def _gap(self, version: int, tokens: int, wave: str = "") -> Tensor:
        """Absolute differences, of the tokens of all prompts one after the other."""
        drawn = self._draw(version, tokens, wave)
        device = next(self._policy.parameters()).device
        training = self._policy.training
        self._policy.eval()
        differences = []
        with self._forward_context():
            for prompt, completion in zip(self._prompts, drawn, strict=True):
                logp, _ = completion_logprobs(
                    self._policy,
                    torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=device),
                    torch.tensor([len(prompt.token_ids)], device=device),
                    torch.tensor([len(completion.token_ids)], device=device),
                    temperature=self._temperature,
                )
                theirs = torch.tensor(completion.logprobs, dtype=logp.dtype)
                differences.append((logp[0].cpu() - theirs).abs())
        self._policy.train(training)
        return torch.cat(differences)

    def _draw(self, version: int, tokens: int, wave: str) -> list[Completion]:
        longest = max(len(prompt.token_ids) for prompt in self._prompts)
        tokens = min(tokens, self._spec.max_model_len - longest)
        sampling = Sampling(tokens, temperature=self._temperature)
        drawn = {f"sync-probe/{wave}{i}": Completion(i) for i in range(len(self._prompts))}
        self._engine.submit(
            [
                Request(name, prompt.token_ids, stable_hash(name, version), sampling)
                for name, prompt in zip(drawn, self._prompts, strict=True)
            ]
        )
        try:
            while any(c.finish_reason is None for c in drawn.values()):
                for event in self._engine.step():
                    drawn[event.request_id].take(event, version)
        finally:
            self._engine.abort(drawn)
        return list(drawn.values())


def tolerance(trainer: torch.dtype, engine: torch.dtype, device: torch.device) -> float:
    """Mean difference that rounding explains, in the coarser of the two precisions."""
    if min(trainer.itemsize, engine.itemsize) < torch.float32.itemsize:
        return TOLERANCE_HALF
    return TOLERANCE_CUDA if device.type == "cuda" else TOLERANCE


def robust_mean(gap: Tensor) -> float:
    """The mean, to which no token adds much; one that is no number counts."""
    return float(gap.clamp(max=MOST_OF_ONE).mean()) if gap.isfinite().all() else float("nan")
