"""What an offline run of W&B holds, read back from its file."""

import os
import shutil
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import WandbLogger

from lit_rlsched.callbacks import SortedBatching
from lit_rlsched.cli.main import main
from lit_rlsched.run.run_config import log_artifact, saved_ids
from lit_rlsched.scheduling.trace_files import Traces

wandb = pytest.importorskip("wandb")
from wandb_file import offline_runs  # noqa: E402

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wandb")]  # `folder` is made once
SMALL = """
seed_everything: 0
data:
  train_data: {class_path: Countdown, init_args: {split: train, size: 16}}
  val_data: {class_path: Countdown, init_args: {split: heldout, size: 4}}
  engine: TransformersEngine
  prompts_per_round: 2
  num_generations: 4
  max_completion_length: 24
  val_num_generations: 0
trainer:
  max_epochs: 1
  accelerator: cpu
  check_val_every_n_epoch: 1
"""


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("PL_GLOBAL_SEED", "0")  # what the CLI sets is unset after the tests
        for name in [n for n in os.environ if n.startswith("SLURM") or n == "WANDB_RUN_ID"]:
            patch.delenv(name)
        yield patch


@pytest.fixture(scope="module")
def folder(patch, tmp_path_factory):
    """A run of the command line, stopped after a round and resumed for another."""
    folder = tmp_path_factory.mktemp("wandb")
    patch.setenv("MY_API_KEY", "canary-1234")
    (folder / "small.yaml").write_text(SMALL)
    callbacks = (
        "--trainer.callbacks=[{class_path: RolloutLogger, init_args: "
        "{num_completions: 2, report_every_n_rounds: 1}}, "
        "{class_path: SortedBatching, init_args: {pool_rounds: 2}}]"
    )
    run = [
        *("fit", "-c", "configs/quickstart.yaml", "-c", str(folder / "small.yaml"), callbacks),
        f"--trainer.default_root_dir={folder}",
        "--data.chat_template_kwargs={secret: canary-1234}",
    ]
    wandb.finish()  # of a test before, which a logger would continue
    main(run)
    main([*run, "--ckpt_path=last", "--trainer.max_epochs=2"])
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    return offline_runs(folder)


def test_a_resumed_run_keeps_its_id(folder, runs):
    first, second = runs
    assert first.id == second.id and first.name == second.name
    assert [row["trainer/global_step"] for row in first.rows if "reward" in row] == [0]
    assert [row["trainer/global_step"] for row in second.rows if "reward" in row] == [1]
    (path,) = (folder / "checkpoints").glob("round_00002*.ckpt")
    assert saved_ids(path) == [first.id]
    assert saved_ids(folder / "nothing.ckpt") == saved_ids(folder / "config.yaml") == []


def test_the_configuration_tells_schedules_apart(runs):
    config = runs[0].config
    assert config["schedule"]["SortedBatching"]["pool_rounds"] == 2
    assert config["trainer"]["max_epochs"] == 1
    assert config["versions"]["wandb" if "wandb" in config["versions"] else "torch"]
    assert config["prompts_per_round"] == 2 and config["loss_type"] == "dapo"
    assert runs[1].config["trainer"]["max_epochs"] == 2


def test_no_secret_is_written(folder):
    for path in folder.rglob("*"):
        if path.is_file() and (path.suffix == ".wandb" or path.name == "hparams.yaml"):
            assert b"canary" not in path.read_bytes(), path


def test_the_name_is_that_of_the_folder_and_tags_say_what_the_run_does(folder, runs):
    assert runs[0].name == folder.name
    assert runs[0].tags == ["grpo", "SortedBatching", "TransformersEngine"]


def test_rounds_tokens_and_seconds_are_axes_of_rewards_and_validations(runs):
    first = runs[0]
    assert {"rollout/round", "num_tokens", "time/total"} <= first.metrics.keys()
    rewards = [row for run in runs for row in run.rows if "reward" in row]
    validations = [row for run in runs for row in run.rows if "val/accuracy" in row]
    assert [row["rollout/round"] for row in rewards] == [1, 2]
    assert [row["rollout/round"] for row in validations] == [0, 1, 2]
    for rows in (rewards, validations):
        for axis in ("num_tokens", "time/total"):
            values = [row[axis] for row in rows]
            assert values == sorted(set(values)), axis


def test_the_best_values_are_in_the_summary(runs):
    for name in ("val/accuracy", "val/reward", "reward"):
        values = [row[name] for row in runs[0].rows if name in row]
        assert runs[0].summary[name] == {"max": max(values), "last": values[-1]}
        assert runs[0].metrics[name].step_metric == "trainer/global_step"


def test_the_configuration_file_is_an_artifact(folder, runs):
    for run in runs:
        (config,) = (a for a in run.artifacts if a.type == "config")
        assert config.name == f"config-{run.id}"
        (entry,) = config.manifest.contents
        assert entry.path == "config.yaml"
        copy = yaml.safe_load(Path(entry.local_path).read_text())
        assert copy["data"]["chat_template_kwargs"] == {"secret": "[redacted]"}
    assert "canary" in (folder / "config.yaml").read_text(), "the run needs it"


def test_the_report_the_lengths_and_the_table_are_in_the_file(folder, runs):
    drawn = Counter(row["round"] for row in Traces(folder).rows("completions"))
    for number, run in enumerate(runs, start=1):
        shown = {name: value for row in run.rows for name, value in row.items()}
        assert shown["completions/_type"] == "table-file"
        assert shown["completions/lengths/_type"] == "histogram"
        assert sum(shown["completions/lengths/values"]) == drawn[number] > 0
        assert shown["report/_type"] == "html-file"
        assert "rewards/countdown_reward/mean" in shown
    (page,) = folder.glob(f"wandb/offline-run-*/files/{shown['report/path']}")
    assert page.read_bytes() == (folder / "report.html").read_bytes()


def test_no_other_command_has_a_run(folder, runs, capfd):
    tables = [a for run in runs for a in run.artifacts if a.type == "run_table"]
    assert len(tables) == 2  # one for each part of the run, which drew one round each
    before = {*folder.glob("wandb/*")}
    for command in ("validate", "predict"):
        data = [f"--data.predict_data={folder / 'completions.jsonl'}"]
        main([command, "-c", str(folder / "config.yaml"), "--ckpt_path=last", *data])
    assert {*folder.glob("wandb/*")} == before
    said = capfd.readouterr()
    assert "wandb:" not in said.out + said.err and "SyntaxWarning" not in said.err
    assert "Loading the model and starting" in said.out and "  predict: 0 of" in said.out


# From Python.


def test_what_the_user_has_named_stays(fit, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")  # `offline=True` goes without `log_model`

    def logger(**settings):
        return WandbLogger(save_dir=tmp_path, tags=["mine"], **settings)

    def run(epochs, logger, ckpt=None):
        trainer, *_ = fit(
            callbacks=[SortedBatching(2)],
            trainer={"logger": logger, "max_epochs": epochs},
            ckpt_path=ckpt,
        )
        log_artifact(trainer, "trained", "model", model_folder)
        return trainer

    model_folder = tmp_path / "trained"
    model_folder.mkdir()
    (model_folder / "config.json").write_text("{}")
    trainer = run(1, logger(name="named", log_model=True))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    wandb.finish()
    run(2, logger(), tmp_path / "a.ckpt")
    wandb.finish()
    named, unnamed = sorted(offline_runs(tmp_path), key=lambda run: run.name != "named")
    assert (named.name, unnamed.name) == ("named", tmp_path.name)
    assert named.tags == ["mine", "grpo", "SortedBatching", "TransformersEngine"]
    assert not unnamed.artifacts, "`log_model` is False"
    (model,) = named.artifacts
    assert (model.name, model.type) == (f"trained-{named.id}", "model")
    assert "config.json" in {entry.path for entry in model.manifest.contents}
    assert saved_ids(tmp_path / "a.ckpt") == [named.id] != [unnamed.id]


# Sweeps.


def commands(sweep):
    """The command of each point of a grid, as W&B's agent builds it."""
    from wandb.sdk.launch.sweeps import utils

    names = [*sweep["parameters"]]
    for point in product(*(sweep["parameters"][name]["values"] for name in names)):
        args = {name: {"value": value} for name, value in zip(names, point, strict=True)}
        flags = utils.create_sweep_command_args({"args": args})["args"]
        command = utils.create_sweep_command(sweep["command"])
        yield [word for part in command for word in (flags if part == "${args}" else [part])]


@pytest.fixture
def sweep():
    return yaml.safe_load((ROOT / "configs/sweep.yaml").read_text())


def test_a_point_of_the_sweep_runs(sweep, patch, tmp_path, monkeypatch):
    grid = [*commands(sweep)]
    assert len(grid) == 12
    name, *args = next(c for c in grid if "--config=configs/sorted_rl.yaml" in c)
    assert name == "lit-rlsched" and args[0] == "fit"
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    quick = yaml.safe_load((tmp_path / "configs/quickstart.yaml").read_text())
    small = yaml.safe_load(SMALL)
    quick["data"] |= small["data"]
    quick["trainer"] |= small["trainer"]
    (tmp_path / "configs/quickstart.yaml").write_text(yaml.safe_dump(quick))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # W&B's service stays in the folder in which it was started
    main(args)
    folder = tmp_path / "runs/quickstart+wandb_online+sorted_rl/version_0"
    (run,) = offline_runs(folder)
    assert run.name == "quickstart+wandb_online+sorted_rl/version_0"
    assert run.config["schedule"]["SortedBatching"]["pool_rounds"] == 4


def test_every_overlay_of_the_sweep_parses(sweep, patch, capsys):
    for _, *args in list(commands(sweep))[::3]:
        with pytest.raises(SystemExit) as stop:
            main([*args, "--print_config"])
        assert stop.value.code == 0
        logger = yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]
        assert logger["init_args"]["offline"] is False
