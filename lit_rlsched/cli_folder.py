"""What the command line makes of folders: each run gets one, and `--ckpt_path last` finds it."""

import atexit
import os
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_rlsched.run_folder import (
    LOCK,
    folder_with,
    holds_run,
    new_folder,
    newest_checkpoint,
    newest_folder,
    occupy,
    remove_unused,
)


class SaveConfig(SaveConfigCallback):
    """Writes the configuration as it was given into the run's folder, as `config.yaml`."""

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, save_to_log_dir=False, **kwargs)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write it; a resumed run replaces it."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_none=False)
        (folder / self.config_filename).write_text(text, encoding="utf-8")


def place(config: Namespace, subcommand: str) -> Path | None:
    """Choose the folder of a run, and of everything in it; None: it leaves nothing.

    A run without `trainer.default_root_dir` goes to `runs/NAME/version_N`, NAME after its
    configuration files; one that is resumed stays where it was. Loggers without a folder write
    there, and `metrics/` there has the figures as CSV.

    Args:
        config: Of the subcommand; changed.
        subcommand: `fit`, `validate`, ...

    Raises:
        FolderInUse: another process runs there.
        ValueError: it would mix with another run's.
    """
    if config.trainer.fast_dev_run:
        return None
    root = Path("runs") / _name(config)
    folder = _fit(config, root) if subcommand == "fit" else _evaluate(config, root, subcommand)
    atexit.register(remove_unused, folder)
    config.trainer.default_root_dir = str(folder)
    config.trainer.logger = _loggers(config.trainer.logger, str(folder))
    return folder


def keep_together(callbacks: list[Callback], folder: Path) -> None:
    """Let checkpoints without a folder of their own go to the run's."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder / "checkpoints")


def _fit(config: Namespace, root: Path) -> Path:
    given, path = config.trainer.default_root_dir, config.ckpt_path
    if given is not None:
        folder = Path(given)
    elif path == "last":
        folder = newest_folder(root) or new_folder(root)
    else:
        folder = (path and folder_with(Path(path))) or _requeued(root) or new_folder(root)
    occupy(folder)
    if path == "last":
        config.ckpt_path = _last(folder, config)
        return folder  # from the beginning, where there is none: as it was before
    requeued = SLURMEnvironment.detect() and any(folder.glob("hpc_ckpt_*.ckpt"))
    if path is None and not requeued and holds_run(folder):
        raise ValueError(
            f"`trainer.default_root_dir={folder}` holds another run, and this one would mix with "
            "it. Go on with that one by `--ckpt_path last`, name another folder, or leave "
            "`default_root_dir` out: each run then gets a folder of its own."
        )
    return folder


def _evaluate(config: Namespace, root: Path, subcommand: str) -> Path:
    given = config.trainer.default_root_dir
    if config.ckpt_path == "last":
        trained = Path(given) if given is not None else newest_folder(root)
        config.ckpt_path = trained and _last(trained, config)
        if config.ckpt_path is None:
            raise ValueError(
                f"`ckpt_path=last`: there is no checkpoint in `{trained or root}`. Name one by "
                "`--ckpt_path FILE`."
            )
    return Path(given) if given is not None else new_folder(root, subcommand)


def _last(folder: Path, config: Namespace) -> str | None:
    callbacks = config.trainer.callbacks or []
    others = [
        Path(dirpath)
        for callback in (callbacks if isinstance(callbacks, list) else [callbacks])
        if (dirpath := callback.get("init_args", {}).get("dirpath"))
    ]
    path = newest_checkpoint(folder, *others)
    if path is None:
        rank_zero_info(f"No checkpoint in `{folder}` to go on from: the run begins there.")
    else:
        rank_zero_info(f"The run goes on in `{folder}`.")
    return None if path is None else str(path)


def _requeued(root: Path) -> Path | None:
    """Where this job ran before SLURM put it back into its queue."""
    folder = newest_folder(root)
    if folder is None or not SLURMEnvironment.detect() or not any(folder.glob("hpc_ckpt_*.ckpt")):
        return None
    return folder if int(os.environ.get("SLURM_RESTART_COUNT", 0)) else None


def _name(config: Namespace) -> str:
    """After the configuration files; that of a run is called as the run."""
    files = [Path(str(file)).absolute() for file in config.get("config") or [] if file is not None]
    again = [file.parent.parent.name if (file.parent / LOCK).exists() else "" for file in files]
    return "+".join(a or file.stem for a, file in zip(again, files, strict=True)) or "run"


def _loggers(logger: Any, folder: str) -> Any:
    """Those that were asked for, in the run's folder, and a table of all figures."""
    if logger is False:
        return False
    given = logger if isinstance(logger, list) else [] if logger in (None, True) else [logger]
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
