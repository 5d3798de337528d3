"""Each run has a folder of its own, nobody else's files in it, and `last` finds its checkpoints."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import forked
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from jsonargparse import Namespace
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rlsched.callbacks import RolloutLogger, RoundCheckpoint
from lit_rlsched.cli import folder as cli_folder
from lit_rlsched.run.saving.checkpoints import AtomicCheckpointIO
from lit_rlsched.run.saving.run_folder import (
    FolderInUse,
    folder_of,
    folder_with,
    holds_run,
    leave,
    new_folder,
    newest_checkpoint,
    newest_folder,
    occupy,
    remove_unused,
)
from lit_rlsched.settings import UsageError

HOLD = """
import sys
from lit_rlsched.run.saving.run_folder import occupy
from contextlib import contextmanager
from pathlib import Path
import subprocess
occupy(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def held(folder):
    """Another process that holds the folder, and has started one of its own."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = int(holder.stdout.readline())
    try:
        yield holder
    finally:
        os.kill(child, signal.SIGKILL)  # it has the pipe, too
        holder.kill()
        holder.communicate()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


def test_folders_are_numbered():
    assert newest_folder(Path("runs/a")) is None
    made = [new_folder(Path("runs/a")) for _ in range(11)]
    assert made[0] == Path("runs/a/version_0") and made[10] == Path("runs/a/version_10")
    new_folder(Path("runs/a"), "validate")
    assert newest_folder(Path("runs/a")) == made[10]
    save(made[3] / "checkpoints" / "a.ckpt")
    assert newest_folder(Path("runs/a")) == made[3]  # the later ones have nothing to resume


@pytest.mark.slow
def test_a_folder_in_use_is_refused_until_the_process_is_gone(tmp_path):
    folder = tmp_path / "run"
    with held(folder) as holder:
        for _ in range(2):
            with pytest.raises(FolderInUse, match=rf"`{folder}` is in use by process {holder.pid}"):
                occupy(folder)
        holder.kill()
        holder.wait()
        occupy(folder)  # though what it had started still lives
        assert json.loads((folder / "run.json").read_text())["process"] == os.getpid()
        leave(folder)


def test_a_folder_that_was_not_used_is_removed():
    used, unused = new_folder(Path("runs/a")), new_folder(Path("runs/b"))
    (used / "report.html").touch()
    for folder in (used, unused):
        occupy(folder)
        remove_unused(folder)
    assert used.exists() and not unused.parent.exists()


def test_the_folder_of_a_checkpoint():
    folder = new_folder(Path("runs/a"))
    occupy(folder)
    leave(folder)
    assert folder_with(folder / "checkpoints" / "x.ckpt") == folder.absolute()
    assert folder_with(Path("somewhere/x.ckpt")) is None
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/x.ckpt").touch()
    Path("link.ckpt").symlink_to(folder / "checkpoints/x.ckpt")
    assert folder_with(Path("link.ckpt")) == folder.resolve()


# What the command line makes of it.


def config(**settings):
    trainer = {"default_root_dir": None, "logger": None, "callbacks": None, "fast_dev_run": False}
    trainer |= settings.pop("trainer", {})
    files = settings.pop("config", ["configs/quick.yaml", "more.yaml"])
    return Namespace(trainer=Namespace(**trainer), config=files, **{"ckpt_path": None, **settings})


def save(path, rounds=1, seconds=0, **more):
    contents = {
        "state_dict": {"weight": torch.zeros(10)},
        "pytorch-lightning_version": "2.6.6",
        "global_step": rounds,
        "optimizer_states": [],
        "RolloutDataModule": {"settings": {}, "num_rounds": rounds},
    }
    AtomicCheckpointIO().save_checkpoint({**contents, **more}, path)
    os.utime(path, (1e9 + seconds, 1e9 + seconds))
    return path


def test_a_run_has_a_folder_of_its_own_named_after_its_configuration():
    first, second = (cli_folder.choose_folder(config(), "fit") for _ in range(2))
    assert [str(first), str(second)] == [f"runs/quick+more/version_{n}" for n in (0, 1)]
    assert str(cli_folder.choose_folder(config(), "validate")) == "runs/quick+more/validate_0"
    assert str(cli_folder.choose_folder(config(config=None), "fit")) == "runs/run/version_0"
    again = config(config=[str(first / "config.yaml")])
    assert str(cli_folder.choose_folder(again, "fit")) == "runs/quick+more/version_2"
    assert cli_folder.choose_folder(config(trainer={"fast_dev_run": True}), "fit") is None


def test_loggers_write_there():
    wandb = Namespace(class_path="x.WandbLogger", init_args=Namespace(save_dir=".", project="p"))
    mine = Namespace(class_path="x.Other", init_args=Namespace(save_dir="mine"))
    settings = config(trainer={"logger": [wandb, mine]})
    folder = str(cli_folder.choose_folder(settings, "fit"))
    table, *rest = settings.trainer.logger
    assert table.class_path.endswith("CSVLogger") and table.init_args.save_dir == folder
    assert [one.init_args.save_dir for one in rest] == [folder, "mine"]
    settings = config(trainer={"logger": False})
    cli_folder.choose_folder(settings, "fit")
    assert settings.trainer.logger is False


def test_a_folder_with_another_run_is_refused():
    Path("old/checkpoints").mkdir(parents=True)
    (Path("old") / "log").touch()
    given = {"trainer": {"default_root_dir": "old"}}
    assert cli_folder.choose_folder(config(**given), "fit") == Path("old")
    save(Path("old/checkpoints/a.ckpt"))
    assert holds_run(Path("old"))
    with pytest.raises(UsageError, match=r"default_root_dir=old` already holds a run.*--ckpt_path"):
        cli_folder.choose_folder(config(**given), "fit")
    settings = config(**given, ckpt_path="last")
    cli_folder.choose_folder(settings, "fit")
    assert settings.ckpt_path.endswith("old/checkpoints/a.ckpt")


def test_last_is_the_newest_of_the_newest_run(capfd):
    settings = config(ckpt_path="last")
    folder = cli_folder.choose_folder(settings, "fit")
    assert settings.ckpt_path is None, "the first time there is nothing to go on from"
    save(folder / "checkpoints" / "a.ckpt", seconds=1)
    newest = save(folder / "b.ckpt", rounds=2, seconds=3)
    weights = save(folder / "c.ckpt", seconds=5)
    contents = torch.load(weights)
    del contents["optimizer_states"]
    AtomicCheckpointIO().save_checkpoint(contents, weights)
    elsewhere = save(Path("mine/d.ckpt"), rounds=3, seconds=2)
    settings = config(ckpt_path="last")
    assert cli_folder.choose_folder(settings, "fit") == folder
    assert settings.ckpt_path == str(newest.resolve())
    theirs = Namespace(class_path="ModelCheckpoint", init_args=Namespace(dirpath="mine"))
    settings = config(ckpt_path="last", trainer={"callbacks": [theirs]})
    cli_folder.choose_folder(settings, "fit")
    assert settings.ckpt_path == str(elsewhere.resolve())
    settings = config(ckpt_path="last")
    cli_folder.choose_folder(settings, "validate")
    assert settings.ckpt_path == str(newest.resolve())


def test_a_named_checkpoint_goes_on_in_its_own_folder():
    first, second = (cli_folder.choose_folder(config(), "fit") for _ in range(2))
    path = save(first / "checkpoints" / "a.ckpt")
    settings = config(ckpt_path=str(path))
    assert cli_folder.choose_folder(settings, "fit") == first.absolute()
    assert settings.ckpt_path == str(path)
    assert second.is_dir() and newest_folder(first.parent) == first


def test_validation_of_a_run_that_is_not_there():
    with pytest.raises(UsageError, match="there is no checkpoint in `runs/quick"):
        cli_folder.choose_folder(config(ckpt_path="last"), "validate")


def test_a_job_that_slurm_puts_back_goes_on_where_it_was(monkeypatch):
    """From its newest checkpoint, whoever saved it; not in the folder of another job."""
    for name, value in {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    folder = cli_folder.choose_folder(config(), "fit")
    path = save(folder / "checkpoints/round_00004-step_000004.ckpt", rounds=4, seconds=1)
    leave(folder)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    other = cli_folder.choose_folder(config(), "fit")
    save(other / "hpc_ckpt_1.ckpt", rounds=4, seconds=2)
    leave(other)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert cli_folder.choose_folder(config(), "fit") not in (folder, other)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for given in (None, "first.ckpt"):  # with which the job began
        settings = config(ckpt_path=given)
        assert cli_folder.choose_folder(settings, "fit") == folder
        assert settings.ckpt_path == str(path.absolute())


NUMBERS = st.integers(0, 5)


@hypothesis.given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5, unique=True), st.data()
)
def test_the_newest_is_what_was_saved_last_whatever_the_times_of_files_say(runs, data):
    """As after a copy; a run that is resumed from an early round goes through later ones again."""
    with TemporaryDirectory() as folder:
        paths = {}
        for seconds, rounds, steps in runs:
            path = Path(folder, f"{len(paths)}.ckpt")
            state = {"settings": {}, "num_rounds": rounds, "unix_seconds": float(seconds)}
            save(path, steps, RolloutDataModule=state)
            paths[path] = seconds, rounds, steps
        newest = max(paths, key=paths.get)
        times = data.draw(st.permutations(range(len(paths))))
        for path, time in zip(paths, times, strict=True):
            os.utime(path, (1e9 + time, 1e9 + time))
        assert newest_checkpoint(Path(folder)) == newest.resolve()


def test_a_copied_run_is_pruned_from_its_oldest_round():
    folder = Path("runs/mine/checkpoints")
    names = [f"round_{n:05}-step_{n:06}.ckpt" for n in (99_999, 100_000, 1, 2)]
    for seconds, name in enumerate(names):
        save(folder / name, seconds=-seconds)
    RoundCheckpoint(keep=2)._prune(folder / names[1])
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[:2])
    save(folder / names[3])
    RoundCheckpoint(keep=2)._prune(folder / names[3])  # it was resumed from an early round
    assert sorted(path.name for path in folder.iterdir()) == sorted([names[1], names[3]])


# Checkpoints that cannot be read.


def test_falls_back_to_the_newest_that_can_be_read_and_names_the_others():
    good = save(Path("run/checkpoints/round_00004-step_000004.ckpt"), rounds=4, seconds=1)
    bad = save(Path("run/checkpoints/round_00007-step_000007.ckpt"), rounds=7, seconds=2)
    bad.write_bytes(bad.read_bytes()[:500])
    empty = Path("run/last.ckpt")
    empty.touch()
    with pytest.warns(UserWarning) as warned:
        assert newest_checkpoint(Path("run")) == good.resolve()
    (message,) = [str(w.message) for w in warned]
    assert f"`{bad.resolve()}` is damaged, or cut off after 500 bytes" in message
    assert f"`{empty.resolve()}` is empty" in message
    assert f"resumes from `{good.resolve()}` instead." in message
    good.unlink()
    with pytest.warns(UserWarning, match=r"starts from scratch instead\."):
        assert newest_checkpoint(Path("run")) is None


# Without the command line.


def test_nothing_is_written_to_the_working_directory(fit, tmp_path):
    trainer, *_ = fit(
        callbacks=[RolloutLogger(), ModelCheckpoint("c")],
        trainer={"default_root_dir": None, "enable_checkpointing": True},
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == []
    assert folder_of(trainer) == tmp_path / "runs" / "version_0"
    assert (tmp_path / "runs" / "version_0" / "report.html").exists()


@pytest.mark.slow
def test_a_folder_of_python_users_is_locked_while_they_train(fit, tmp_path):
    folder = tmp_path / "run"
    once = {"max_epochs": 1, "default_root_dir": folder}

    class Look(RolloutLogger):
        def on_round_end(self, trainer, pl_module, round):
            super().on_round_end(trainer, pl_module, round)
            self.said = forked.run(occupy, folder, timeout=120).stderr

    look = Look()
    fit(callbacks=[look], trainer=once)
    assert f"in use by process {os.getpid()}" in look.said, look.said
    with held(folder) as holder, pytest.raises(FolderInUse, match=f"process {holder.pid}"):
        fit(callbacks=[RolloutLogger()], trainer=once)


def test_a_trainer_has_one_folder(tmp_path):
    first, second = Trainer(logger=False), Trainer(logger=False)
    assert folder_of(first) == folder_of(first) != folder_of(second)
    assert folder_of(Trainer(logger=False, default_root_dir=tmp_path / "a")) == tmp_path / "a"
