"""Completions that vLLM alone draws with the model of the quick task."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_check.drawing import (
    DTYPES,
    common_prefix,
    draw,
    gap,
    policy_on,
    precision_of,
    prompts,
    requests,
    spec_of,
    sync,
    tokens_of,
)
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.setting import QUICK_TASK, Setting
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.base import RolloutEngine

RUNNERS = {"cuda": "vllm.v1.worker.gpu.model_runner", "cpu": "vllm.v1.worker.cpu_model_runner"}
"""The second generation on CUDA, where noise is a hash of seed and position."""
BACKENDS = {
    ("cuda", "fp32"): ("TRITON_ATTN", "FLEX_ATTENTION"),
    ("cuda", "bf16"): ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"),
    ("cpu", "fp32"): ("CPU_ATTN",),
    ("cpu", "bf16"): ("CPU_ATTN",),
}
MEAN_GAP = {("cuda", "fp32"): 5e-3, ("cpu", "fp32"): 1e-4}
"""Limit of log-prob differences; TF32 rounding, if there is any, stays within the first."""
MEAN_GAP_BF16 = 0.05
GONE_ON = {"fp32": 0.9, "bf16": 0.4}
"""Least share of tokens that stay the same after a pause. Kernels round differently in prefills and
decode steps, and one different token changes all later ones. With other noise only a few percent
would stay the same.
"""
PROMPTS, TOKENS, PAUSE = 16, 64, 24


def tiny(setting: Setting, found: Findings, dtype: str, graphs: bool) -> None:
    """Check runner, attention backend, log-probs, seeds and pauses."""
    if graphs and not setting.on_gpu:
        raise Skip("CUDA graphs need a GPU")
    policy = policy_on(setting, QUICK_TASK)
    engine = VLLMEngine(kv_cache_gib=setting.pick(1.0, None), enforce_eager=not graphs)
    spec = spec_of(QUICK_TASK, setting.device, DTYPES[dtype], PROMPTS, 256)
    engine.start(spec)
    judge_runner(found, described(engine), setting.device, dtype, graphs)
    engine.wake()
    context = precision_of(spec.dtype, setting.device)
    asked = prompts(QUICK_TASK, PROMPTS)
    limit = MEAN_GAP.get((setting.device, dtype), MEAN_GAP_BF16)
    judge_draws(found, engine, policy, asked, limit, GONE_ON[dtype], context)
    engine.close()


def described(engine: VLLMEngine) -> dict[str, Any]:
    """Ask vLLM's worker which implementations it chose."""
    said: dict[str, Any] = engine._live.collective_rpc(describe)[0]
    return said


def describe(worker: Any) -> dict[str, Any]:
    """Return model runner, attention backends and CUDA graphs of a worker of vLLM."""
    runner = worker.model_runner
    config = runner.compilation_config
    layers = config.static_forward_context.values()
    used = {x.get_attn_backend().get_name() for x in layers if hasattr(x, "get_attn_backend")}
    graphs = getattr(config.cudagraph_mode, "name", str(config.cudagraph_mode))
    return {"runner": type(runner).__module__, "backends": sorted(used), "graphs": graphs}


def judge_runner(
    found: Findings, said: dict[str, Any], device: str, dtype: str, graphs: bool
) -> None:
    """Check that the choices are those that vLLM's source code suggests."""
    found.equal(
        "model runner",
        said["runner"],
        RUNNERS[device],
        "Completions that pause draw other tokens. Report it with vLLM's version.",
    )
    for backend in said["backends"] or ["none"]:
        found.one_of(
            "attention backend",
            backend,
            BACKENDS[device, dtype],
            "vLLM chose a backend that was never tested. Report it with the GPU's name.",
        )
    if graphs:
        found.equal("CUDA graphs are captured", said["graphs"] != "NONE", True)
    found.record("CUDA graphs", said["graphs"])


def judge_draws(
    found: Findings,
    engine: RolloutEngine,
    policy: nn.Module,
    asked: Sequence[Sequence[int]],
    mean_gap: float,
    gone_on: float,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Draw the same tokens twice and after a pause, and compare with the trainer's log-probs.

    Args:
        found: Findings of the check.
        engine: Engine that is awake.
        policy: The trainer's model.
        asked: Prompts.
        mean_gap: Largest mean difference of log-probs.
        gone_on: Least share of tokens after a pause before the first that differs.
        context: Precision of the trainer's forward pass.
    """
    perturb(policy)  # otherwise an engine that never receives weights would pass
    sync(engine, policy, 1)
    first = draw(engine, requests(asked, TOKENS))
    differences = gap(policy, asked, first, context)
    found.at_most(
        "mean log-prob gap",
        float(differences.mean()),
        mean_gap,
        "nats",
        "The engine does not decode with the trained weights, or rounds far more than it should. "
        "Report this page.",
    )
    found.record("largest log-prob gap", float(differences.max()), "nats")
    sync(engine, policy, 2)  # empties its prefix cache
    second = draw(engine, requests(asked, TOKENS))
    found.equal(
        "the same seeds draw the same tokens",
        tokens_of(second) == tokens_of(first),
        True,
        "Runs cannot be repeated on this GPU. Report it with its name.",
    )
    sync(engine, policy, 3)
    found.at_least(
        "tokens after a pause as without one",
        paused_share(engine, asked, tokens_of(first)),
        gone_on,
        "of all",
        "A paused completion does not resume with its own noise. Report it.",
    )


def paused_share(
    engine: RolloutEngine, asked: Sequence[Sequence[int]], whole: Sequence[Sequence[int]]
) -> float:
    """Draw again with a pause and return the share of later tokens before the first difference."""
    begun = draw(engine, requests(asked, TOKENS, pause_at=PAUSE))
    batch = [
        replace(request, prefix_ids=tuple(tokens[:PAUSE]))
        for request, tokens in zip(requests(asked, TOKENS), tokens_of(begun), strict=True)
    ]
    rest = tokens_of(draw(engine, batch))
    same = [
        common_prefix(ours, theirs[PAUSE:]) if start == theirs[:PAUSE] else 0
        for start, ours, theirs in zip(tokens_of(begun), rest, whole, strict=True)
    ]
    return sum(same) / (len(asked) * (TOKENS - PAUSE))


@torch.no_grad()
def perturb(policy: nn.Module, scale: float = 0.02) -> None:
    """Change every weight a little, so that they differ from those of the checkpoint."""
    for parameter in policy.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.add_(noise.to(parameter) * parameter.abs().mean())
