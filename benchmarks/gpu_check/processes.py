"""Checks of engines in other processes: on the trainer's GPU, and split over two."""

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from lightning import LightningModule, Trainer

from benchmarks.gpu_check.decoding import MEAN_GAP_BF16
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.setting import Setting
from benchmarks.gpu_check.shapes import shape_model
from benchmarks.gpu_check.training import Hoard, fit, judge_rounds
from lit_rlsched.callbacks import ParallelismPlanner, StreamedTraining
from lit_rlsched.engines import ProcessEngine, VLLMEngine
from lit_rlsched.scheduling.rollpacker import RoundKind, TensorParallelPlanner

SIZES = (1, 2, 1)
"""Devices of each round."""


class TimedProcess(ProcessEngine):
    """Measure the time of weight syncs and wakes."""

    def __init__(self, engine: VLLMEngine) -> None:
        super().__init__(engine)
        self.syncs: list[tuple[float, int]] = []
        """Seconds and bytes."""
        self.wakes: list[float] = []

    def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Measure the sync."""
        began, count = time.perf_counter(), 0

        def counted() -> Iterable[tuple[str, torch.Tensor]]:
            nonlocal count
            for name, tensor in named_tensors:
                count += tensor.numel() * tensor.element_size()
                yield name, tensor

        super().sync_weights(counted(), version)
        self.syncs.append((time.perf_counter() - began, count))

    def wake(self) -> None:
        """Measure the wake."""
        began = time.perf_counter()
        super().wake()
        self.wakes.append(time.perf_counter() - began)


def process_engine(setting: Setting, found: Findings) -> None:
    """Check an engine process on the trainer's GPU, with gradients during the rollout."""
    engine = TimedProcess(VLLMEngine(gpu_memory_utilization=0.4))
    fitted = fit(
        setting,
        shape_model(setting, "0.6B"),
        rounds=3,
        precision="bf16-mixed",
        engine=engine,
        callbacks=[StreamedTraining(), Hoard()],
        prompts_per_round=setting.pick(32, 4),
        max_completion_length=setting.pick(256, 32),
        micro_batch_tokens=setting.pick(16384, 1024),
    )
    judge_rounds(found, fitted.rounds, 3, MEAN_GAP_BF16)
    judge_process(found, engine.restarts, len(engine.wakes), engine.syncs)
    found.record("slowest wake", max(engine.wakes), "s")
    for name in ("streamed_share", "gradient_seconds", "overlap_seconds"):
        column = fitted.rounds.column(f"streamed_training/{name}")
        found.record(f"{name}, last round", column[-1])


def judge_process(
    found: Findings, restarts: int, wakes: int, syncs: list[tuple[float, int]]
) -> None:
    """Check that it woke in every round and did not die."""
    found.at_least("wakes", wakes, 3, "", "The run ended early. Report the log.")
    found.at_most(
        "restarts of the engine's process",
        restarts,
        0,
        "",
        "It ran out of memory as it woke, or crashed: the log says which. Report it.",
    )
    seconds, count = syncs[-1]
    found.record("weight sync", seconds, "s")
    found.record("speed of the weight sync", count / seconds / 1e9, "GB/s")


class ScriptedPlanner(ParallelismPlanner):
    """Take the sizes from a list and restart the engine as the planner does."""

    def __init__(self, sizes: Iterable[int]) -> None:
        super().__init__(maximum=2)
        self.sizes = list(sizes)
        self.seen: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the sizes, then turn planning off."""
        super().on_train_start(trainer, pl_module)
        self.planner = _Script(self.sizes)

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Any) -> None:
        """Record the size of the round."""
        super().on_round_end(trainer, pl_module, round)
        self.seen.append(self._engine.tensor_parallel_size)


class _Script(TensorParallelPlanner):
    """Takes its sizes from a list instead of planning them, one for each round."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes[0], max(sizes), min(sizes))
        self.left = list(sizes)

    def size(self, kind: RoundKind) -> int:
        return self.left[0]

    def observe(self, kind: RoundKind, preemptions: int) -> None:
        self.left.pop(0)


def two_devices(setting: Setting, found: Findings) -> None:
    """Check a run with the model on one device, on two, and on one again."""
    there = torch.cuda.device_count() if setting.on_gpu else len(os.sched_getaffinity(0))
    if there < 2:
        raise Skip(f"needs two {setting.pick('GPUs', 'cores')}, and there is one")
    planner = ScriptedPlanner(SIZES)
    fitted = fit(
        setting,
        shape_model(setting, "0.6B"),
        rounds=len(SIZES),
        precision="bf16-mixed",
        callbacks=[planner],
        engine=VLLMEngine(gpu_memory_utilization=0.4),
        max_completion_length=setting.pick(128, 32),
    )
    judge_rounds(found, fitted.rounds, len(SIZES), MEAN_GAP_BF16)
    found.equal("devices of each round", planner.seen, list(SIZES), "Report the log.")
    found.record("restart", max(fitted.rounds.column("time/restart")), "s")
