"""W&B runs besides settings and metrics: name, tags, x-axes, artifacts, id."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.run.run_config import algorithm, run_name, schedule
from lit_rlsched.run.saving.checkpoints import CheckpointError, inspect_checkpoint
from lit_rlsched.run.saving.run_folder import full_name_of

AXES = ("rollout/round", "num_tokens", "time/total")
"""Metrics in every row of a round or a validation, for the x-axis of charts."""
BEST = ("val/accuracy", "val/reward", "reward")
"""Metrics whose maximum is in the summary, as `NAME.max`; the last value is `NAME.last`."""


def wandb_loggers(trainer: Trainer) -> Iterator[WandbLogger]:
    """Yield the Trainer's `WandbLogger`s; only the first process has any."""
    if trainer.is_global_zero:
        yield from (one for one in trainer.loggers if isinstance(one, WandbLogger))


def prepare_runs(trainer: Trainer) -> None:
    """Settle what W&B prints, before its runs begin: a link to the run, offline nothing."""
    for logger in wandb_loggers(trainer):
        options = logger._wandb_init
        if options.get("anonymous", "") is None:
            del options["anonymous"]  # W&B warns of it, and Lightning always passes it
        # Lightning's `offline=True` sets the variable to the old name
        offline = (options.get("mode") or os.environ.get("WANDB_MODE")) in ("offline", "dryrun")
        if options.get("settings") is None:
            options["settings"] = {"silent": True} if offline else {"quiet": True}


def describe_runs(trainer: Trainer, engine: RolloutEngine) -> None:
    """Give each W&B run tags, x-axes and, if its logger has no `name`, that of the run's folder."""
    step = {"step_metric": "trainer/global_step", "step_sync": True}  # as `WandbLogger` does
    for logger in wandb_loggers(trainer):
        run: Any = logger.experiment
        if logger._name is None and "WANDB_NAME" not in os.environ:
            run.name = _name(trainer)
        tags = (algorithm(trainer.lightning_module), *schedule(trainer), engine.name)
        run.tags = tuple(dict.fromkeys((*(run.tags or ()), *tags)))
        for name in AXES:
            run.define_metric(name)
        for name in BEST:
            run.define_metric(name, summary="max,last", **step)


def _name(trainer: Trainer) -> str:
    """Return the name of the run's folder, or of what the run does if it has none yet."""
    folder = Path(trainer.default_root_dir).absolute()
    return run_name(trainer) if folder == Path.cwd() else full_name_of(folder)


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
        checkpoint = inspect_checkpoint(path, verify=False)
    except (OSError, CheckpointError):
        return []  # Lightning will say so, or knows how to read it
    states = (state for state in checkpoint.values() if isinstance(state, dict))
    return next((state["wandb_ids"] for state in states if "wandb_ids" in state), [])


def warn_of_new_runs(trainer: Trainer, saved: Sequence[str]) -> None:
    """Warn if a resumed run is not logged to the W&B runs of its checkpoint.

    W&B runs begin before Lightning reads the checkpoint, so it is too late to change that.
    """
    for logger, theirs in zip(wandb_loggers(trainer), saved, strict=False):
        if logger.version != theirs:
            rank_zero_warn(
                f"The checkpoint belongs to the W&B run `{theirs}`, but this run is logged as "
                f"`{logger.version}`. To continue the old one, use `WandbLogger(id={theirs!r})`."
            )
