"""Check that vLLM returns its GPU memory, takes it again, and still draws correctly."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu_check.decoding import MEAN_GAP, PROMPTS, perturb
from benchmarks.gpu_check.drawing import (
    draw,
    gap,
    policy_on,
    prompts,
    requests,
    spec_of,
    sync,
    tokens_of,
)
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.setting import QUICK_TASK, Setting
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.training.lora import add_lora
from lit_rlsched.training.policy import adapter_spec, named_adapters

FREED = 0.9
"""Least share of its memory that the engine returns while it sleeps."""
DRIFT = 64 * 2**20
"""Bytes by which memory in use may grow from the first to the last cycle."""
CYCLES = 5
CACHE = 8.0
"""GiB of key-value cache: large compared with CUDA graphs, which stay in memory."""
REPORT = "The trainer would not have this memory in its updates. Report this page with vLLM's log."


def memory_of(device: str) -> Callable[[], int]:
    """Return a function that measures the bytes in use on the GPU, or by this process."""
    if device == "cpu":
        return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    return used


def cycles(setting: Setting, found: Findings) -> None:
    """Sync, draw, sleep and wake five times."""
    policy = policy_on(setting, QUICK_TASK)
    memory, engine = memory_of(setting.device), VLLMEngine(kv_cache_gib=setting.pick(CACHE, None))
    before = memory()
    engine.start(spec_of(QUICK_TASK, setting.device, torch.float32, PROMPTS, 256))
    if not setting.on_gpu:
        found.skip("vLLM sleeps on CUDA only; on CPU its memory stays")
    asked = prompts(QUICK_TASK, PROMPTS)
    judge_cycles(found, engine, policy, asked, memory, before, setting.on_gpu)
    engine.close()


def judge_cycles(
    found: Findings,
    engine: RolloutEngine,
    policy: nn.Module,
    asked: list[list[int]],
    memory: Callable[[], int],
    before: int,
    sleeps: bool = True,
) -> None:
    """Check memory awake and asleep, and the drawn tokens, in each cycle.

    Args:
        found: Findings of the check.
        engine: Engine that has started.
        policy: The trainer's model.
        asked: Prompts.
        memory: Returns the bytes in use.
        before: Bytes in use before the engine started.
        sleeps: Whether the engine can sleep; otherwise memory is only recorded.
    """
    awake, asleep, drawn = [], [], []
    for cycle in range(CYCLES):
        engine.wake()
        sync(engine, policy, cycle)
        drawn.append(tokens_of(draw(engine, requests(asked, 32))))
        awake.append(memory())
        engine.sleep()
        asleep.append(memory())
        found.record(f"in use in cycle {cycle + 1}, awake", awake[-1] / 2**20, "MiB")
        found.record(f"in use in cycle {cycle + 1}, asleep", asleep[-1] / 2**20, "MiB")
    engine.wake()
    sync(engine, policy, CYCLES)
    if sleeps:
        taken = max(1, awake[0] - before)
        freed = min((up - down) / taken for up, down in zip(awake, asleep, strict=True))
        found.at_least("given back asleep, in every cycle", freed, FREED, "of what it took", REPORT)
        for name, values in (("awake", awake), ("asleep", asleep)):
            drift = (values[-1] - values[0]) / 2**20
            found.at_most(f"drift {name}", drift, DRIFT / 2**20, "MiB", REPORT)
    found.equal(
        "every cycle draws the same tokens",
        all(tokens == drawn[0] for tokens in drawn),
        True,
        "Weights or cache are not what they were before the sleep. Report this page.",
    )


def close_asleep(setting: Setting, found: Findings) -> None:
    """Check that an engine can be closed while it sleeps, and another one started."""
    policy = policy_on(setting, QUICK_TASK)
    memory, asked = memory_of(setting.device), prompts(QUICK_TASK, PROMPTS)
    before = memory()
    spec = spec_of(QUICK_TASK, setting.device, torch.float32, PROMPTS, 256)
    for turn in range(2):
        engine = VLLMEngine(kv_cache_gib=setting.pick(CACHE, None))
        engine.start(spec)
        engine.wake()
        perturb(policy)
        sync(engine, policy, turn)
        drawn = draw(engine, requests(asked, 32))
        found.at_most(
            f"mean log-prob gap of engine {turn + 1}",
            float(gap(policy, asked, drawn).mean()),
            MEAN_GAP[setting.device, "fp32"],
            "nats",
            "Report this page.",
        )
        awake = memory()
        engine.sleep()
        engine.close()
        if setting.on_gpu:
            freed = (awake - memory()) / max(1, awake - before)
            found.at_least(f"engine {turn + 1} closed", freed, FREED, "of what it took", REPORT)


def adapters_alone(setting: Setting, found: Findings) -> None:
    """Check the log-probs of LoRA adapters in vLLM's slot, before and after a sleep."""
    policy = add_lora(policy_on(setting, QUICK_TASK), 16, 16, "all-linear").to(setting.device)
    engine = VLLMEngine(kv_cache_gib=setting.pick(CACHE, None), enable_lora=True)
    asked = prompts(QUICK_TASK, PROMPTS)
    spec = spec_of(QUICK_TASK, setting.device, torch.float32, PROMPTS, 256)
    engine.start(replace(spec, adapters=adapter_spec(policy)))
    for when in ("before a sleep", "after it"):
        engine.wake()
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        engine.sync_weights(named_adapters(policy), 0)
        found.at_most(
            f"mean log-prob gap {when}",
            float(gap(policy, asked, draw(engine, requests(asked, 32))).mean()),
            MEAN_GAP[setting.device, "fp32"],
            "nats",
            "Train without `enable_lora`, and report this page.",
        )
        engine.sleep()
    engine.close()
