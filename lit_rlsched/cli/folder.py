"""Folders of runs that the command line starts: each run gets one, `last` finds its checkpoints."""

import atexit
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lit_rlsched.run.run_config import log_artifact, saved_ids
from lit_rlsched.run.saving.run_folder import (
    LOCK,
    folder_with,
    holds_run,
    last_use,
    new_folder,
    newest_checkpoint,
    newest_folder,
    occupy,
    remove_unused,
)
from lit_rlsched.settings import UsageError
from lit_rlsched.text import without_secrets

_OF_RANKS = "LIT_RLSCHED_FOLDER"
"""Environment variable with folder and checkpoint, for the ranks that Lightning starts."""


class SaveConfig(SaveConfigCallback):
    """Write the configuration to `config.yaml` in the run's folder, as the user gave it."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file; a resumed run replaces it, another command in its folder does not."""
        folder = Path(trainer.default_root_dir)
        if stage != "fit" and (folder / self.config_filename).exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_none=False)
        (folder / self.config_filename).write_text(text, encoding="utf-8")
        with TemporaryDirectory() as shared:
            path = Path(shared, self.config_filename)
            path.write_text(redacted(text), encoding="utf-8")
            log_artifact(trainer, "config", "config", path)


def redacted(text: str) -> str:
    """Return a configuration in YAML without secrets; unchanged if it has none."""
    settings = yaml.safe_load(text)
    shown = without_secrets(settings)
    return text if shown == settings else yaml.safe_dump(shown, sort_keys=False)


def choose_folder(config: Namespace, subcommand: str) -> Path | None:
    """Choose and lock the folder that the run writes all its files to, and fill it in.

    Without `trainer.default_root_dir` this is a new `runs/NAME/version_N`, where NAME joins the
    names of the configuration files; None with `trainer.fast_dev_run`, which writes nothing.
    """
    if config.ckpt_path == "best":
        raise UsageError(
            "`--ckpt_path=best`: only the process that trains knows which checkpoint is the best. "
            "Give the file of a checkpoint, or `last`."
        )
    if config.trainer.fast_dev_run:
        return None
    leads = not getattr(rank_zero_only, "rank", 0)  # of torchrun, SLURM or Lightning
    if leads:
        files = [Path(str(f)).absolute() for f in config.get("config") or [] if f is not None]
        # `config.yaml` of a run stands for its run
        names = [f.parent.parent.name if (f.parent / LOCK).exists() else f.stem for f in files]
        root = Path("runs") / ("+".join(names) or "run")
        folder = _fit(config, root) if subcommand == "fit" else _evaluate(config, root, subcommand)
        atexit.register(remove_unused, folder)
        os.environ[_OF_RANKS] = json.dumps([str(folder), config.ckpt_path])
    else:
        folder = _follow(config)
    config.trainer.default_root_dir = str(folder)
    config.trainer.logger = _loggers(config.trainer.logger, str(folder), subcommand)
    loggers = config.trainer.logger or []
    wandb = [one.init_args for one in loggers if one.class_path.endswith("WandbLogger")]
    # each without an `id` continues the run of the checkpoint; in a sweep the agent names the run
    # of each process, even if all begin with one checkpoint
    if leads and wandb and config.ckpt_path and "WANDB_RUN_ID" not in os.environ:
        for options, run_id in zip(wandb, saved_ids(config.ckpt_path), strict=False):
            if options.get("id") is None and options.get("version") is None:
                options["id"] = run_id
    return folder


def _follow(config: Namespace) -> Path:
    """Return the folder that rank 0 has chosen, and take its checkpoint."""
    if _OF_RANKS in os.environ:  # this process was started by Lightning
        folder, config.ckpt_path = json.loads(os.environ[_OF_RANKS])
        return Path(folder)
    given = config.trainer.default_root_dir
    if given is None:
        raise UsageError(
            "`trainer.default_root_dir` is missing: processes that torchrun or SLURM starts do not "
            "see which folder the first of them chooses. Name one for each run."
        )
    if config.ckpt_path == "last" or _is_put_back():
        _take_newest(Path(given), config)
    return Path(given)


def keep_together(callbacks: list[Callback], folder: Path) -> None:
    """Let each `ModelCheckpoint` without a `dirpath` write to the run's folder."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            # a resumed `ModelCheckpoint` knows its best model if this is the same
            callback.dirpath = os.path.realpath(folder / "checkpoints")


def _fit(config: Namespace, root: Path) -> Path:
    given, path = config.trainer.default_root_dir, config.ckpt_path
    own: Path | None = None  # in which this job ran before SLURM put it back
    if _is_put_back():
        folders = [Path(given)] if given is not None else root.glob("version_*")
        uses = {folder: last_use(folder) for folder in folders}
        job = os.environ.get("SLURM_JOB_ID")
        ours = [folder for folder, use in uses.items() if job and use.get("slurm_job") == job]
        own = max(ours, key=lambda folder: str(uses[folder].get("since")), default=None)
    if own is not None:
        folder = own
    elif given is not None:
        folder = Path(given)
    elif path == "last":
        folder = newest_folder(root) or new_folder(root)
    else:
        folder = (path and folder_with(Path(path))) or new_folder(root)
    occupy(folder)
    if path == "last" or own is not None:
        _take_newest(folder, config)
        return folder  # without a checkpoint, the run starts again in the same folder
    if path is None and holds_run(folder):
        raise UsageError(
            f"`trainer.default_root_dir={folder}` already holds a run. Resume that one with "
            "`--ckpt_path last`, name another folder, or leave `default_root_dir` out so that each "
            "run gets a new folder."
        )
    return folder


def _evaluate(config: Namespace, root: Path, subcommand: str) -> Path:
    given = config.trainer.default_root_dir
    if config.ckpt_path == "last":
        trained = Path(given) if given is not None else newest_folder(root)
        if trained is None or not _take_newest(trained, config, resumes=False):
            raise UsageError(
                f"`ckpt_path=last`: there is no checkpoint in `{trained or root}`. Name one with "
                "`--ckpt_path FILE`."
            )
    return Path(given) if given is not None else new_folder(root, subcommand)


def _take_newest(folder: Path, config: Namespace, resumes: bool = True) -> bool:
    """Take the folder's newest checkpoint; without one, that with which a job began, if any."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    others = [callback.get("init_args", {}).get("dirpath") for callback in callbacks]
    path = newest_checkpoint(folder, *map(Path, filter(None, others)))
    if path is not None:
        what = "The run resumes in" if resumes else "Checkpoint of"
        rank_zero_info(f"{what} `{folder}`: `{path.name}`.")
        config.ckpt_path = str(path)
    elif resumes:
        rank_zero_info(f"There is no checkpoint in `{folder}`: the run starts from scratch.")
    if config.ckpt_path == "last":
        config.ckpt_path = None
    return path is not None


def _is_put_back() -> bool:
    """Whether SLURM starts this job again: its time was over, or a node has failed."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def _loggers(logger: Any, folder: str, subcommand: str) -> Any:
    """Return the configured loggers, writing to the folder, and a CSV logger if there is none."""
    if logger is False:
        return False
    given = logger if isinstance(logger, list) else [] if logger in (None, True) else [logger]
    if subcommand != "fit":  # another command's run at W&B would be nearly empty
        given = [one for one in given if not str(one.get("class_path")).endswith("WandbLogger")]
    for one in given:
        options = one.get("init_args")
        if options is not None and options.get("save_dir", "") in (None, "."):
            options["save_dir"] = folder
    if any(str(one.get("class_path")).endswith("CSVLogger") for one in given):
        return given
    options = Namespace(save_dir=folder, name="metrics")
    return [Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=options), *given]
