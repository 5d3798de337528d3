"""List of the checks in their order: half an hour on one H100."""

from typing import Any

from benchmarks.gpu_check.runner import Check


def _check(
    name: str, shows: str, function: str, planned: float, limit: float, **more: Any
) -> Check:
    essential = more.pop("essential", False)
    path = f"benchmarks.gpu_check.{function}"
    return Check(name, shows, path, planned, limit, more, essential)


CHECKS = [
    _check(
        "environment",
        "Driver, C compiler, Python's headers and versions are what torch and vLLM need.",
        "environment:environment",
        40,
        180,
        essential=True,
    ),
    *(
        _check(
            f"tiny-{dtype}-{'graphs' if graphs else 'eager'}",
            "vLLM runs as it was read, draws with the trained weights, the same tokens from the "
            f"same seeds, and goes on after a pause ({dtype}, "
            f"{'CUDA graphs' if graphs else 'eager'}).",
            "decoding:tiny",
            75 if graphs else 40,
            300,
            dtype=dtype,
            graphs=graphs,
        )
        for dtype in ("fp32", "bf16")
        for graphs in (False, True)
    ),
    _check(
        "sleep-cycles",
        "An engine gives its memory back while it sleeps, five times, and draws the same tokens.",
        "sleeping:cycles",
        75,
        300,
    ),
    _check(
        "close-asleep",
        "An engine that is closed asleep leaves memory and a process in which another one starts.",
        "sleeping:close_asleep",
        90,
        300,
    ),
    _check(
        "adapters-alone",
        "LoRA adapters in vLLM's slot give the trainer's log-probs, before and after a sleep.",
        "sleeping:adapters_alone",
        45,
        300,
    ),
    _check(
        "fit-then-test",
        "`fit` and then `test` in one process, each with an engine.",
        "runs:fit_then_test",
        100,
        300,
    ),
    *(
        _check(
            f"quickstart-{name}",
            f"`make quickstart` trains for ten rounds in `{precision}`, every sync verified.",
            "runs:quickstart",
            90,
            420,
            precision=precision,
        )
        for name, precision in (("fp32", "32-true"), ("bf16", "bf16-mixed"))
    ),
    _check(
        "decode-speed",
        "How fast a 0.6B decodes with 256, 512 and 1,024 slots, and what of a step is the host's.",
        "real:decode_speed",
        180,
        480,
    ),
    _check(
        "update-chunks",
        "What forward and backward of a 0.6B take, by the chunk size of the LM head.",
        "real:update_chunks",
        40,
        240,
    ),
    *(
        _check(
            f"train-{kind}",
            f"A 0.6B trains ({kind}) for {rounds} rounds within the memory that was estimated.",
            "real:train",
            110,
            420,
            shape="0.6B",
            kind=kind,
            rounds=rounds,
        )
        for kind, rounds in (("lora", 5), ("full", 5))
    ),
    *(
        _check(
            f"probe-{name}",
            f"Engine and trainer agree on whole completions of 256 tokens in `{precision}`.",
            "real:probe",
            75,
            300,
            precision=precision,
        )
        for name, precision in (("mixed", "bf16-mixed"), ("true", "bf16-true"))
    ),
    _check(
        "process-engine",
        "An engine process on the trainer's GPU wakes in every round beside streamed gradients.",
        "processes:process_engine",
        120,
        420,
    ),
    _check(
        "transfer-ipc",
        "An engine on the trainer's GPU reads a 4B by CUDA IPC and draws with it.",
        "transfers:transfer",
        60,
        300,
        kind="ipc",
    ),
    _check(
        "train-7b",
        "A 7B shape trains with LoRA for two rounds on 80 GB.",
        "real:train",
        240,
        600,
        shape="7B",
        kind="lora",
        rounds=2,
    ),
    _check(
        "resume",
        "A run that was killed goes on to its end; how far it differs is recorded, not judged.",
        "runs:resume",
        150,
        480,
    ),
    _check(
        "two-devices",
        "The model is split over two devices and made whole again, within one run.",
        "processes:two_devices",
        150,
        480,
    ),
    _check(
        "transfer-nccl",
        "The trainer on one GPU sends a 4B over NCCL to an engine on a second GPU.",
        "transfers:transfer",
        60,
        300,
        kind="nccl",
    ),
    *(
        _check(
            f"transfer-ranks-{kind}",
            "Two ranks of FSDP2 train beside two engines, whose weights come "
            f"{'by CUDA IPC' if kind == 'ipc' else 'over NCCL'}.",
            "transfers:ranks",
            150,
            480,
            kind=kind,
        )
        for kind in ("ipc", "nccl")
    ),
    _check(
        "transfer-nodes",
        "The trainer sends a 4B over NCCL to engines on all nodes of a Ray cluster.",
        "transfers:nodes",
        150,
        480,
    ),
]
MORE_GPUS = (
    "two-devices",
    "transfer-nccl",
    "transfer-ranks-ipc",
    "transfer-ranks-nccl",
    "transfer-nodes",
)
"""Names of those that one GPU is not enough for."""
