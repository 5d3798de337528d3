"""Signals to a run of the command line: it stops soon, saves, says how to go on, and does."""

import json
import os
import re
import signal
from pathlib import Path

import forked
import forked_engines
import pytest

from lit_rlsched.run.saving.checkpoints import read_checkpoint

ROOT = Path(__file__).parents[1]
CALLBACK = '''
import os, signal
import psutil
from lit_rlsched.callbacks import RolloutCallback

class Send(RolloutCallback):
    """Sends signals to the process group, as a terminal does, in the middle of the second round."""

    def __init__(self, names: list[str]):
        self.names = names

    def on_completion_end(self, trainer, pl_module, completion):
        if trainer.datamodule.run.num_rounds == 1:
            while self.names:
                number = getattr(signal, self.names.pop(0))
                if number == signal.SIGUSR1:  # SLURM's reaches all processes of a job
                    for child in psutil.Process().children(recursive=True):
                        child.send_signal(number)
                os.killpg(os.getpgrp(), number)
'''
CONFIG = """
model: {class_path: GRPOModule, init_args: {model: MODEL, learning_rate: 1.0e-3}}
data:
  train_data: prompts.jsonl
  reward_funcs: [rewards.digits]
  engine: {class_path: ProcessEngine, init_args: {engine: TransformersEngine}}
  prompts_per_round: 4
  num_generations: 2
  max_completion_length: 48
  micro_batch_tokens: 256
trainer:
  accelerator: cpu
  max_epochs: 3
  callbacks:
    - class_path: RolloutLogger
"""
REWARD = """
def digits(prompts, completions, completion_ids, **kwargs):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""


@pytest.fixture
def fit(tiny_model, tmp_path):
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "send.py").write_text(CALLBACK)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "short.yaml").write_text(CONFIG.replace("MODEL", tiny_model))

    def fit(*arguments, begin=forked.command_line, **environment):
        return forked.run(
            begin,
            *("fit", "-c", "short.yaml", *arguments),
            folder=tmp_path,
            environment={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            timeout=280,
        )

    return fit


def with_forked_engines(*arguments):
    forked_engines.begin()
    forked.command_line(*arguments)


def send(names):
    return ["--trainer.callbacks+=send.Send", f"--trainer.callbacks.names={names}"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_stops_in_mid_rollout_saves_and_goes_on(name, code, fit, tmp_path):
    begin = with_forked_engines if name == "SIGTERM" else forked.command_line
    stopped = fit(*send(f"[{name}]"), begin=begin)
    assert stopped.returncode == code, stopped.stderr
    assert "Traceback" not in stopped.stderr and " died " not in stopped.stderr
    assert "stopping and saving" in stopped.stderr and "rank" not in stopped.stderr
    summary, how = stopped.stdout.splitlines()[-2:]
    assert re.match(r"short: reward .* \(1 rounds?, .*runs/short/version_0", summary), summary
    path = re.fullmatch(
        r"The run was stopped before its end\. Resume it with `lit-rlsched fit -c "
        r"runs/short/version_0/config.yaml --ckpt_path (\S+)`\.",
        how,
    )[1]
    state = read_checkpoint(tmp_path / path)["RolloutDataModule"]
    assert (state["num_rounds"], state["round"]) == (1, None)
    folder = tmp_path / "runs/short/version_0"
    assert (folder / "report.html").exists()

    if name == "SIGINT":
        return  # what follows is the same
    resumed = fit("--ckpt_path", path, begin=with_forked_engines)
    assert resumed.returncode == 0, resumed.stderr
    assert [p.name for p in (tmp_path / "runs/short").iterdir()] == ["version_0"]
    rounds = [json.loads(line)["round"] for line in (folder / "completions.jsonl").open()]
    assert rounds == [n for n in (1, 2, 3) for _ in range(8)]
    newest = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert newest[-1] == "round_00003-step_000003.ckpt" and len(newest) == 2


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(fit, tmp_path):
    stopped = fit(*send("[SIGINT,SIGINT]"), begin=with_forked_engines)
    assert stopped.returncode == 130, stopped.stderr
    assert "--ckpt_path" not in stopped.stdout
    files = [p.name for p in (tmp_path / "runs/short/version_0/checkpoints").iterdir()]
    assert files == ["round_00001-step_000001.ckpt"]


@pytest.mark.slow
def test_slurm_saves_in_mid_rollout_and_the_requeued_job_is_the_run_that_was_never_stopped(
    fit, tmp_path
):
    whole = fit()
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$REQUEUED"\n')
    (tmp_path / "scontrol").chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    # the job's time is up: saved and put back
    stopped = fit(*send("[SIGUSR1]"), **slurm)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "goes on when SLURM starts the job again" in stopped.stdout
    assert " died " not in stopped.stderr
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    goes_on = fit(*send("[]"), **slurm, SLURM_RESTART_COUNT="1")
    assert goes_on.returncode == 0, goes_on.stderr
    never_stopped, requeued = sorted((tmp_path / "runs/short").iterdir())
    drawn, expected = [
        [without_times(line) for line in (folder / "completions.jsonl").open()]
        for folder in (requeued, never_stopped)
    ]
    assert drawn == expected and len(drawn) == 3 * 8


def without_times(line):
    return {name: value for name, value in json.loads(line).items() if "time" not in name}
