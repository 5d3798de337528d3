"""Checks of whole runs: the quick task, `fit` and then `test`, and a run that is killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.decoding import MEAN_GAP, MEAN_GAP_BF16
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.setting import QUICK_TASK, Setting
from benchmarks.gpu_check.training import (
    LOGP_MAX,
    LOGP_MEAN,
    Hoard,
    judge_rounds,
    prepare,
    worst,
)
from benchmarks.gpu_check.training import Rounds as Recorder
from lit_rlsched.run.saving.checkpoints import read_checkpoint
from lit_rlsched.run.saving.run_folder import newest_checkpoint

BASELINE = 0.42
"""Held-out accuracy of the quick task's model before training, on a CPU."""
NOISE = 0.08
"""Four standard errors of an accuracy from 512 samples."""


def quickstart(setting: Setting, found: Findings, precision: str) -> None:
    """Run `make quickstart` for ten rounds."""
    rounds = setting.pick(10, 2)
    folder = setting.path("run")
    run(arguments(setting, folder, rounds, precision))
    judge_quickstart(found, figures_of(folder), rounds, setting.device, precision)


def arguments(setting: Setting, folder: Path, rounds: int, precision: str) -> list[str]:
    """Return the arguments of `lit-rlsched fit`."""
    small = ["--data.prompts_per_round=2", "--data.max_completion_length=32"]
    small += ["--data.val_data.init_args.size=4", "--data.val_num_generations=1"]
    return [
        *("fit", "--config", "configs/quickstart.yaml", "--debug"),
        f"--trainer.accelerator={setting.pick('gpu', 'cpu')}",
        f"--trainer.max_epochs={rounds}",
        f"--trainer.precision={precision}",
        f"--trainer.check_val_every_n_epoch={rounds}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=true",
        *setting.pick([], small),
    ]


def run(args: list[str]) -> None:
    """Run the command line in this process."""
    from lit_rlsched.cli.main import main

    main(args)


def figures_of(folder: Path) -> dict[str, list[float]]:
    """Return the values of each column of a run's metrics in order."""
    (path,) = folder.glob("metrics/*/metrics.csv")
    columns: dict[str, list[float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    columns.setdefault(name, []).append(float(value))
    return columns


def rounds_of(figures: dict[str, list[float]]) -> Recorder:
    """Return what a run has logged of each round."""
    recorder = Recorder()
    names = ["loss", LOGP_MEAN, LOGP_MAX, "sync/max_logp_diff"]
    columns = [figures.get(name, []) for name in names]
    recorder.figures = [
        dict(zip(names, values, strict=True)) for values in zip(*columns, strict=False)
    ]
    return recorder


def judge_quickstart(
    found: Findings,
    figures: dict[str, list[float]],
    rounds: int,
    device: str,
    precision: str,
) -> None:
    """Check that all rounds ran, syncs are within their limits, and the start is as good as on CPU.

    Args:
        found: Findings of the check.
        figures: Metrics of the run.
        rounds: Expected number of rounds.
        device: `cuda` or `cpu`.
        precision: Precision of the Trainer.
    """
    dtype = "fp32" if precision == "32-true" else "bf16"
    limit = MEAN_GAP.get((device, dtype), MEAN_GAP_BF16)
    judge_rounds(found, rounds_of(figures), rounds, limit)
    accuracy = figures.get("val/accuracy", [float("nan")])
    if device == "cuda":
        found.at_least(
            "held-out accuracy of the untrained model",
            accuracy[0],
            BASELINE - NOISE,
            "",
            f"It is {BASELINE} on a CPU: completions are worse here. Report this page.",
        )
        found.at_least(
            "held-out accuracy after training",
            accuracy[-1],
            accuracy[0] - NOISE,
            "",
            "Training makes it worse. Report this page.",
        )
    else:
        found.record("held-out accuracy", " -> ".join(f"{value:.2f}" for value in accuracy))
    for name in ("time/rollout", "reward"):
        if name in figures:
            found.record(f"{name}, last round", figures[name][-1])


def fit_then_test(setting: Setting, found: Findings) -> None:
    """Check two stages in one process, each with its own engine."""
    from benchmarks.gpu_check.training import rows

    recorder = Recorder()
    trainer, module, data = prepare(
        setting,
        QUICK_TASK,
        callbacks=[recorder, Hoard()],
        test_data=rows(8),
        val_num_generations=1,
        val_greedy=False,
        val_accuracy_threshold=0.0,
    )
    trainer.fit(module, datamodule=data)
    judge_rounds(found, recorder, 2, MEAN_GAP[setting.device, "fp32"])
    (figures,) = trainer.test(module, datamodule=data, verbose=False)
    found.equal("held-out prompts answered", figures.get("test/accuracy"), 1.0, "Report this page.")


def resume(setting: Setting, found: Findings) -> None:
    """Check a run that is killed by SIGKILL and resumed against one that is not."""
    rounds = setting.pick(4, 2)
    whole, killed = setting.path("whole"), setting.path("killed")
    subprocess.run(command(arguments(setting, whole, rounds, "32-true")), check=True)
    begun = command(arguments(setting, killed, rounds, "32-true"))
    found.equal("killed after its first checkpoint", kill_when_saved(begun, killed), True)
    again = [*arguments(setting, killed, rounds, "32-true"), "--ckpt_path=last"]
    subprocess.run(command(again), check=True)
    ours, theirs = state_of(killed), state_of(whole)
    found.equal("rounds after the resume", ours["global_step"], theirs["global_step"])
    difference = worst(
        [
            float((ours["state_dict"][name].float() - weight.float()).abs().max())
            for name, weight in theirs["state_dict"].items()
        ]
    )
    share = same_completions(killed / "completions.jsonl", whole / "completions.jsonl")
    if setting.on_gpu:  # kernels are not batch invariant
        found.record("largest difference of a weight", difference)
        found.record("completions that are the same", share, "of all")
    else:
        found.at_most("largest difference of a weight", difference, 0.0)
        found.at_least("completions that are the same", share, 1.0, "of all")


def command(args: list[str]) -> list[str]:
    """Return the command `lit-rlsched` with these arguments."""
    return [sys.executable, "-m", "lit_rlsched", *args]


def kill_when_saved(command: list[str], folder: Path) -> bool:
    """Start a run, kill it once it saved a checkpoint, and return whether it was still running."""
    process = subprocess.Popen(command)
    try:
        while process.poll() is None and not list(folder.rglob("*.ckpt")):
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def state_of(folder: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run."""
    path = newest_checkpoint(folder)
    assert path is not None, f"{folder} has no checkpoint"
    return dict(read_checkpoint(path))


def same_completions(ours: Path, theirs: Path) -> float:
    """Return the share of equal lines in two tables of completions, in any order."""

    def texts(path: Path) -> set[str]:
        lines = map(json.loads, path.read_text().splitlines())
        return {
            json.dumps([line.get(k) for k in ("round", "prompt", "completion")]) for line in lines
        }

    a, b = texts(ours), texts(theirs)
    return len(a & b) / max(1, len(a | b))
