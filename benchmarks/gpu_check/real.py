"""Checks of a model of realistic size: speed, memory and rounding."""

from typing import Any

import torch

from benchmarks.gpu_check.decoding import MEAN_GAP_BF16
from benchmarks.gpu_check.drawing import (
    DTYPES,
    policy_on,
    prompts,
    requests,
    spec_of,
    sync,
)
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.setting import Setting
from benchmarks.gpu_check.shapes import shape_model
from benchmarks.gpu_check.training import (
    CountedVLLM,
    Fitted,
    fit,
    judge_rounds,
    now,
    prepare,
)
from lit_rlsched.callbacks import MicroGroupSampling
from lit_rlsched.cli.estimate import Ledger, PlannedRun
from lit_rlsched.cli.estimate.run import fake_batch
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.micro_batches import MicroBatch
from lit_rlsched.types import Sampling

LEAST_SPEED = 2000.0
"""Tokens/s of the 0.6B model with 256 slots below which something must be broken."""
RATIO = (0.6, 1.4)
"""Limits of measured peak memory relative to `lit-rlsched estimate`."""
SAME_LOSS = 2e-2
"""Limit of the relative difference of a loss between chunk sizes, in bf16."""
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 32, "gradient_checkpointing": True},
}


def decode_speed(setting: Setting, found: Findings) -> None:
    """Measure tokens/s and the host's share of a step, by slots."""
    model = shape_model(setting, "0.6B")
    policy = policy_on(setting, model)
    speeds = {}
    for slots in setting.pick((256, 512, 1024), (4, 8)):
        engine = VLLMEngine(gpu_memory_utilization=0.6)
        engine.start(spec_of(model, setting.device, DTYPES["bf16"], slots, 512))
        engine.wake()
        seconds = sync(engine, policy)
        found.record(f"weight sync, {slots} slots", seconds, "s")
        speeds[slots] = measure_steps(setting, found, engine, model, slots)
        engine.close()
    if setting.on_gpu:
        judge_speed(found, speeds, LEAST_SPEED)
    else:  # milliseconds of a rehearsal are noise
        found.at_least("tokens/s", min(speeds.values()), 1.0)


def measure_steps(
    setting: Setting, found: Findings, engine: RolloutEngine, model: str, slots: int
) -> float:
    """Decode with full slots and return tokens/s."""
    warm, timed = setting.pick((40, 100), (2, 8))
    engine.submit(requests(prompts(model, slots), 256))
    for _ in range(warm):
        engine.step()
    began, drawn = now(), 0
    for _ in range(timed):
        drawn += sum(len(event.token_ids) for event in engine.step())
    seconds = (now() - began) / timed
    found.record(f"decode step, {slots} slots", 1e3 * seconds, "ms")
    found.record(f"tokens/s, {slots} slots", drawn / (seconds * timed))
    if setting.on_gpu:
        busy = kernel_seconds(engine, 20)
        found.record(f"host's share of a step, {slots} slots", 1 - busy / seconds, "of all")
    engine.abort([f"r{i}" for i in range(slots)])
    return drawn / (seconds * timed)


def kernel_seconds(engine: RolloutEngine, steps: int) -> float:
    """Return the seconds of a step in which a kernel runs, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profile.key_averages()) / 1e6 / steps


def judge_speed(found: Findings, speeds: dict[int, float], least: float) -> None:
    """Check that decoding is not slower than a floor, and not slower with more slots."""
    fewest, *_, most = speeds
    found.at_least(f"tokens/s with {fewest} slots", speeds[fewest], least, "", "Report this page.")
    found.at_least(
        f"tokens/s with {most} slots over those with {fewest}",
        speeds[most] / speeds[fewest],
        0.9,
        "",
        "More slots decode slower: use fewer (`MicroGroupSampling(slots=...)`), and report it.",
    )


def update_chunks(setting: Setting, found: Findings) -> None:
    """Measure milliseconds of forward and backward by the chunk size of the LM head."""
    policy = policy_on(setting, shape_model(setting, "0.6B"))
    policy.gradient_checkpointing_enable()
    policy.train()  # required by gradient checkpointing
    rows, prompt, completion = setting.pick((16, 256, 768), (2, 8, 24))
    batch = fake_batch(rows, prompt, completion, Sampling(completion), old=False, reference=False)
    vocabulary = policy.config.get_text_config().vocab_size
    losses = {}
    for mib in (64, 256, 1024):
        chunk = setting.pick(mib * 2**20 // (4 * vocabulary), mib // 16)
        seconds, losses[mib] = passes(policy, batch.to(policy.device), chunk, setting)
        found.record(f"forward and backward, {mib} MiB of logits", 1e3 * seconds, "ms")
    found.record("positions", rows * (prompt + completion))
    first, *others = losses.values()
    found.at_most(
        "largest relative difference of the losses",
        max(abs(loss - first) / abs(first) for loss in others),
        SAME_LOSS,
        "",
        "The chunk size changes what is computed. Report this page.",
    )


def passes(
    policy: torch.nn.Module, batch: MicroBatch, chunk: int, setting: Setting
) -> tuple[float, float]:
    """Return the seconds of the second of two passes, and its mean log-prob."""
    for _ in range(2):
        began = now()
        with torch.autocast(setting.device, torch.bfloat16):
            logp, _ = completion_logprobs(
                policy,
                batch.input_ids,
                batch.prompt_lengths,
                batch.completion_lengths,
                entropy=True,
                chunk_tokens=chunk,
            )
        logp.mean().backward()
        seconds = now() - began
        policy.zero_grad(set_to_none=True)
    return seconds, float(logp.detach().mean())


def train(setting: Setting, found: Findings, shape: str, kind: str, rounds: int) -> None:
    """Run a few rounds; measure seconds of rollout and update, and peak memory."""
    least = {"7B": 70}.get(shape, 0)
    if setting.on_gpu and torch.cuda.get_device_properties(0).total_memory < least * 2**30:
        raise Skip(f"a {shape} with these settings needs a GPU of {least} GiB")
    settings: dict[str, Any] = {
        "rounds": rounds,
        "precision": "bf16-mixed",
        "module": SETTINGS[kind],
        "words": setting.pick(64, 8),
        "callbacks": [MicroGroupSampling(slots=setting.pick(256, 8))],
        "prompts_per_round": setting.pick(32, 2),
        "num_generations": setting.pick(8, 4),
        "max_completion_length": setting.pick(512, 32),
        "micro_batch_tokens": setting.pick(16384, 1024),
    }
    model = shape_model(setting, shape)
    expected = estimate(setting, model, settings)
    engine = CountedVLLM(gpu_memory_utilization=0.4)
    fitted = fit(setting, model, engine=engine, **settings)
    judge_rounds(found, fitted.rounds, rounds, MEAN_GAP_BF16)
    for name in ("tokens/s", "seconds/rollout", "seconds/update"):
        found.record(f"{name}, last round", fitted.rounds.column(name)[-1])
    found.record("estimated peak of an update", expected / 2**30, "GiB")
    if setting.on_gpu:
        judge_peak(found, max(fitted.rounds.column("peak")) - engine.bytes, expected)


def estimate(setting: Setting, model: str, settings: dict[str, Any]) -> int:
    """Return the peak bytes of an update by `lit-rlsched estimate`."""
    engine = VLLMEngine(gpu_memory_utilization=0.4)
    run = prepare(setting, model, accelerator="cpu", engine=engine, **settings)
    return Ledger(PlannedRun(*run, setting.device), 2**37).peak()[1]


def judge_peak(found: Findings, measured: float, estimated: int) -> None:
    """Compare the peak memory of an update with the estimate."""
    advice = "`lit-rlsched estimate` is wrong here. Report this page."
    found.record("peak of an update", measured / 2**30, "GiB")
    found.at_least("over the estimate", measured / estimated, RATIO[0], "", advice)
    found.at_most("over the estimate", measured / estimated, RATIO[1], "", advice)


def probe(setting: Setting, found: Findings, precision: str) -> None:
    """Compare log-probs of completions of 256 tokens after prompts of 500."""
    fitted = fit(
        setting,
        shape_model(setting, "0.6B"),
        rounds=1,
        precision=precision,
        words=setting.pick(160, 40),
        prompts_per_round=setting.pick(8, 2),
        max_completion_length=setting.pick(256, 64),
        micro_batch_tokens=setting.pick(16384, 4096),
    )
    judge_rounds(found, fitted.rounds, 1, MEAN_GAP_BF16)
    judge_rotary(found, fitted)


def judge_rotary(found: Findings, fitted: Fitted) -> None:
    """Check the rotary embedding: bf16 frequencies turn distant positions by whole radians."""
    buffers = {n: b.dtype for n, b in fitted.module.named_buffers() if n.endswith("inv_freq")}
    found.equal(
        "rotary frequencies are fp32",
        bool(buffers) and set(buffers.values()) == {torch.float32},
        True,
        "The trainer's model differs from the engine's, more so in longer completions. Use "
        "`precision: bf16-mixed`, and report it.",
    )
