"""The command line with two processes, started by Lightning and by torchrun."""

import csv
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
import yaml

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHORT = {
    "model": {"class_path": "GRPOModule", "init_args": {"model": "examples/countdown/model"}},
    "data": {
        "train_data": {"class_path": "Countdown", "init_args": {"size": 40}},
        "val_data": {"class_path": "Countdown", "init_args": {"split": "heldout", "size": 4}},
        "reward_funcs": ["lit_rlsched.rewards.functions.countdown_reward"],
        "engine": {"class_path": "TransformersEngine"},
        "prompts_per_round": 2,
        "num_generations": 4,
        "max_completion_length": 16,
    },
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "devices": 2,
        "callbacks": [{"class_path": "RolloutLogger"}],
    },
}
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]


def fit(folder, *args, start=("-m",)):
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump(SHORT))
    command = [sys.executable, *start, "lit_rlsched", "fit", "-c", str(config), *args]
    env = {k: v for k, v in os.environ.items() if k != "LIT_RLSCHED_FOLDER"}  # of another test
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)


def test_two_processes_write_one_run_that_resumes(tmp_path):
    """Lightning starts the run, and torchrun goes on with it."""
    folder = tmp_path / "run"
    options = ["--trainer.strategy=ddp", f"--trainer.default_root_dir={folder}"]
    done = fit(tmp_path, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Next:") == 1
    assert done.stdout.count("round 2/2:") == 1
    longer = ["--ckpt_path=last", "--trainer.max_epochs=3", "--trainer.strategy=fsdp2"]
    done = fit(tmp_path, *longer, options[1], start=TORCHRUN)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("round 3/3:") == 1 and "round 2/3" not in done.stdout
    rows = csv.DictReader((folder / "metrics/version_0/metrics.csv").open())
    assert [int(float(row["rollout/round"])) for row in rows if row.get("reward")]


def test_torchrun_without_a_folder_is_refused(tmp_path):
    done = fit(tmp_path, "--trainer.strategy=ddp", start=TORCHRUN)
    assert done.returncode != 0
    assert "`trainer.default_root_dir` is missing" in done.stderr


def fit_as_torchrun(folder, *options):
    """What two forked ranks end with, each with its own options, as torchrun would start them."""
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump(SHORT))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["fit", "-c", str(config), "--trainer.strategy=ddp"]
    arguments += [f"--trainer.default_root_dir={folder / 'run'}"]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}

    environment = {k: v for k, v in os.environ.items() if k != "LIT_RLSCHED_FOLDER"} | shared

    def rank(number):
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        return forked.run(
            forked.command_line,
            *(*arguments, *options[number]),
            timeout=120,
            folder=ROOT,
            environment={**environment, **own},
        )

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(rank, range(2))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (2 * [["--data.num_engines=3"]], "`num_engines=3` is more than `prompts_per_round=2`"),
        ([[], ["--data.seed=4"]], "Rank 1 has `seed=4`, and rank 0 has `seed=0`"),
    ],
    ids=["engines", "seed"],
)
def test_a_wrong_setting_of_two_ranks_is_told_without_a_traceback(tmp_path, options, words):
    for done in fit_as_torchrun(tmp_path, *options):
        assert done.returncode == 2, done.stderr
        assert f"error: {words}" in done.stderr and "Traceback" not in done.stderr, done.stderr
