"""Checks of weights from GPU to GPU: one engine, two ranks with two engines, and several nodes."""

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.gpu_check.decoding import MEAN_GAP_BF16
from benchmarks.gpu_check.drawing import draw, gap, prompts, requests, spec_of
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.runs import arguments, command, figures_of, rounds_of
from benchmarks.gpu_check.setting import Setting
from benchmarks.gpu_check.shapes import shape_model
from benchmarks.gpu_check.training import judge_rounds, now
from lit_rlsched.engines import ProcessEngine, RayEngine, VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.weights import HandedWeights
from lit_rlsched.training.policy import load_policy
from lit_rlsched.training.weight_sync import PolicyReader

Kind = Literal["ipc", "nccl"]
GPUS: dict[Kind, int] = {"ipc": 1, "nccl": 2}
"""GPUs for a trainer and an engine."""
SECONDS = 0.35
"""Expected limit of a sync of 8 GB, a 4B in bf16, on one node: 23 GB/s. Others report 25 to 30 GB/s
for a plain broadcast over NVLink. Nothing was measured here."""
SECONDS_NODES = 3.0
"""The same between nodes: 2.7 GB/s, a network of 25 Gbit/s."""
SLOWER_RANKS = 2.0
"""Expected factor on the time per byte if two ranks gather the weights first."""
SYNCS, PROMPTS, TOKENS = 3, 16, 32
ADVICE = (
    "The limit is an expectation that was never measured. Report this page with the output of "
    "`nvidia-smi topo -m`."
)
REHEARSED = "weights go from GPU to GPU on GPUs only; on CPU they went through host memory"


def transfer(setting: Setting, found: Findings, kind: Kind) -> None:
    """Send a 4B to an engine: on the trainer's GPU with `ipc`, on the second one with `nccl`."""
    need_gpus(setting, GPUS[kind], kind)
    inner = VLLMEngine(gpu_memory_utilization=0.4)
    engine = ProcessEngine(inner, weight_transfer=setting.pick(kind, None))
    measure(setting, found, engine, GPUS[kind] - 1, SECONDS)


def nodes(setting: Setting, found: Findings) -> None:
    """Send a 4B to engines on all GPUs of a Ray cluster."""
    if not setting.on_gpu or not os.environ.get("RAY_ADDRESS"):
        raise Skip("needs GPUs and `RAY_ADDRESS`, a Ray cluster without the trainer's GPU")
    import ray

    ray.init()
    gpus = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
    if sum(count > 0 for count in gpus) < 2:
        raise Skip(f"needs GPUs on two nodes of the Ray cluster, which has {gpus} on its nodes")
    engine = RayEngine(VLLMEngine(gpu_memory_utilization=0.4), weight_transfer="nccl")
    pool = EnginePool.of(engine, int(sum(gpus)))
    found.record("engines", len(pool.engines))
    measure(setting, found, pool, 0, SECONDS_NODES)


def need_gpus(setting: Setting, count: int, kind: Kind) -> None:
    """Skip a check that needs more GPUs; on CPU, let the one of CUDA IPC go on as a rehearsal.

    Raises:
        Skip: There are fewer GPUs.
    """
    if not setting.on_gpu:
        if kind == "nccl":
            raise Skip("needs GPUs; on CPU the check of CUDA IPC is the same and was rehearsed")
        return
    if (there := torch.cuda.device_count()) < count:
        raise Skip(f"needs {count} GPUs, and this machine has {there}")


def measure(
    setting: Setting, found: Findings, engine: RolloutEngine, first_gpu: int, limit: float
) -> None:
    """Send changed weights several times, draw with the last ones, and judge time and log-probs."""
    model = shape_model(setting, "4B")
    policy: Any = load_policy(model, torch.bfloat16).to(torch.device(setting.device))
    reader, asked = PolicyReader(policy), prompts(model, PROMPTS)
    slots = PROMPTS * len(engine.engines)
    spec = spec_of(model, setting.device, torch.bfloat16, slots, 256)
    engine.start(replace(spec, first_gpu=setting.pick(first_gpu, 0)))
    if not setting.on_gpu:
        found.skip(REHEARSED)
    seconds = []
    try:
        for version in range(SYNCS):
            engine.wake()
            turn_around(policy)
            began = now()
            engine.sync_weights(reader.weights(), version)
            seconds.append(now() - began)
            if version < SYNCS - 1:
                engine.sleep()
        gaps = [gap(policy, asked, draw(e, requests(asked, TOKENS))) for e in engine.engines]
    finally:
        engine.close()
    found.at_most(
        "mean log-prob gap of the worst engine",
        max(float(each.mean()) for each in gaps),
        MEAN_GAP_BF16,
        "nats",
        "An engine does not have the weights that were sent. Report this page.",
    )
    judge_sync(found, seconds, sum(p.nbytes for p in policy.parameters()), limit)


@torch.no_grad()
def turn_around(policy: nn.Module) -> None:
    """Reverse the rows of every matrix: another model, made on the GPU in no time."""
    for parameter in policy.parameters():
        if parameter.ndim > 1:
            parameter.copy_(parameter.flip(0))


def judge_sync(found: Findings, seconds: list[float], count: int, limit: float) -> None:
    """Check the time of the last sync; the first one connects trainer and engines.

    Args:
        found: Findings of the check.
        seconds: Duration of each sync.
        count: Bytes of the weights.
        limit: Largest duration.
    """
    found.record("first weight sync, with the connection", seconds[0], "s")
    found.record("weights", count / 1e9, "GB")
    found.record("speed of the weight sync", count / seconds[-1] / 1e9, "GB/s")
    if found.skipped:  # seconds of a rehearsal are noise
        found.record("weight sync", seconds[-1], "s")
    else:
        found.at_most("weight sync", seconds[-1], limit, "s", ADVICE)


class TimedEngine(ProcessEngine):
    """Write the seconds of each hand-over to a file.

    Args:
        engine: See `ProcessEngine`.
        weight_transfer: See `ProcessEngine`.
        log: Path of the file, with a line per sync.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        weight_transfer: Literal["ipc", "nccl"] | None = None,
        log: str = "",
    ) -> None:
        super().__init__(engine, weight_transfer)
        self.log = log

    def hand_over(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> HandedWeights:
        """Measure it: with `weight_transfer` it is the whole sync of all engines."""
        began = now()
        handed = super().hand_over(named_tensors)
        with Path(self.log).open("a") as file:
            file.write(f"{json.dumps(now() - began)}\n")
        return handed


def ranks(setting: Setting, found: Findings, kind: Kind) -> None:
    """Train with two ranks of FSDP2 and two engines: on the ranks' GPUs, or on two more."""
    need_gpus(setting, 2 * GPUS[kind], kind)
    if not setting.on_gpu:
        found.skip(REHEARSED)
    rounds, model = setting.pick(4, 2), shape_model(setting, "0.6B")
    folder, log = setting.path("run"), setting.path("syncs.jsonl")
    subprocess.run(
        command(
            [
                *arguments(setting, folder, rounds, "bf16-mixed"),
                f"--model.model={model}",
                "--data.reward_funcs=[benchmarks.ledger.spread]",  # random weights solve nothing
                "--trainer.devices=2",
                "--trainer.strategy=fsdp2",
                "--data.num_engines=2",
                "--data.engine=benchmarks.gpu_check.transfers.TimedEngine",
                f"--data.engine.engine={setting.pick('VLLMEngine', 'TransformersEngine')}",
                f"--data.engine.log={log}",
                *setting.pick([f"--data.engine.weight_transfer={kind}"], []),
            ]
        ),
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    judge_rounds(found, rounds_of(figures_of(folder)), rounds, MEAN_GAP_BF16)
    seconds = [float(line) for line in log.read_text().splitlines()]
    count = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    judge_sync(found, seconds, count, max(SECONDS * SLOWER_RANKS * count / 8e9, 0.2))
