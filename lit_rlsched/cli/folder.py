"""Folders of runs that the command line starts: each run gets one, `last` finds its checkpoints."""

import atexit
import json
import os
from collections.abc import Iterator
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

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, save_to_log_dir=False, **kwargs)

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
        root = Path("runs") / _name(config)
        folder = _fit(config, root) if subcommand == "fit" else _evaluate(config, root, subcommand)
        atexit.register(remove_unused, folder)
        os.environ[_OF_RANKS] = json.dumps([str(folder), config.ckpt_path])
    else:
        folder = _follow(config)
    config.trainer.default_root_dir = str(folder)
    config.trainer.logger = _loggers(config.trainer.logger, str(folder), subcommand)
    if leads and subcommand == "fit":
        _continue_wandb_runs(config, folder)
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
        _go_on(Path(given), config)
    return Path(given)


def keep_together(callbacks: list[Callback], folder: Path) -> None:
    """Let each `ModelCheckpoint` without a `dirpath` write to the run's folder."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            # a resumed `ModelCheckpoint` knows its best model if this is the same
            callback.dirpath = os.path.realpath(folder / "checkpoints")


def _continue_wandb_runs(config: Namespace, folder: Path) -> None:
    """Let each W&B logger without an `id` continue the run of the checkpoint."""
    loggers = config.trainer.logger or []
    wandb = [one.init_args for one in loggers if one.class_path.endswith("WandbLogger")]
    # in a sweep the agent names the run of each process, even if all begin with one checkpoint
    if wandb and config.ckpt_path and "WANDB_RUN_ID" not in os.environ:
        for options, run_id in zip(wandb, saved_ids(config.ckpt_path), strict=False):
            if options.get("id") is None and options.get("version") is None:
                options["id"] = run_id


def _fit(config: Namespace, root: Path) -> Path:
    given, path = config.trainer.default_root_dir, config.ckpt_path
    if (own := _folder_of_job(root, given)) is not None:
        folder = own
    elif given is not None:
        folder = Path(given)
    elif path == "last":
        folder = newest_folder(root) or new_folder(root)
    else:
        folder = (path and folder_with(Path(path))) or new_folder(root)
    occupy(folder)
    if path == "last" or own is not None:
        _go_on(folder, config)
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
        config.ckpt_path = trained and _last(trained, config, resumes=False)
        if config.ckpt_path is None:
            raise UsageError(
                f"`ckpt_path=last`: there is no checkpoint in `{trained or root}`. Name one with "
                "`--ckpt_path FILE`."
            )
    return Path(given) if given is not None else new_folder(root, subcommand)


def _go_on(folder: Path, config: Namespace) -> None:
    """Take the folder's newest checkpoint; without one, that with which a job began, if any."""
    began = None if config.ckpt_path == "last" else config.ckpt_path
    config.ckpt_path = _last(folder, config) or began


def _last(folder: Path, config: Namespace, resumes: bool = True) -> str | None:
    path = newest_checkpoint(folder, *_checkpoint_folders(config))
    if path is not None:
        what = "The run resumes in" if resumes else "Checkpoint of"
        rank_zero_info(f"{what} `{folder}`: `{path.name}`.")
        return str(path)
    if resumes:
        rank_zero_info(f"There is no checkpoint in `{folder}`: the run starts from scratch.")
    return None


def _checkpoint_folders(config: Namespace) -> Iterator[Path]:
    callbacks = config.trainer.callbacks or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if dirpath := callback.get("init_args", {}).get("dirpath"):
            yield Path(dirpath)


def _is_put_back() -> bool:
    """Whether SLURM starts this job again: its time was over, or a node has failed."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def _folder_of_job(root: Path, given: str | None) -> Path | None:
    """Return the folder in which this job ran before SLURM put it back."""
    if not _is_put_back():
        return None
    folders = [Path(given)] if given is not None else root.glob("version_*")
    uses = {folder: last_use(folder) for folder in folders}
    job = os.environ.get("SLURM_JOB_ID")
    ours = [folder for folder, use in uses.items() if job and use.get("slurm_job") == job]
    return max(ours, key=lambda folder: str(uses[folder].get("since")), default=None)


def _name(config: Namespace) -> str:
    """Join the names of the configuration files; `config.yaml` of a run stands for its run."""
    files = [Path(str(file)).absolute() for file in config.get("config") or [] if file is not None]
    names = [f.parent.parent.name if (f.parent / LOCK).exists() else f.stem for f in files]
    return "+".join(names) or "run"


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
    options = Namespace(
        save_dir=folder, name="metrics", version=None, prefix="", flush_logs_every_n_steps=100
    )
    return [Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=options), *given]
