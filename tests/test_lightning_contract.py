"""Lightning: releases that are safe to load a checkpoint with, and what we touch below its API."""

import ast
from importlib.metadata import version
from pathlib import Path

import lightning
import pytest
from torch import nn
from vllm_contract import Source, Touch, requirement

import lit_rlsched

PACKAGE = Path(lit_rlsched.__file__).parent
TOUCHED = (
    Touch("lightning.fabric.utilities.seed", "_collect_rng_states()"),
    Touch("lightning.fabric.utilities.seed", "_set_rng_states(states)"),
    Touch(
        "lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop._batches_that_stepped"
    ),
    *(
        Touch("lightning.pytorch.strategies.model_parallel", f"ModelParallelStrategy.{name}")
        for name in ("_setup_distributed()", "_data_parallel_size", "_tensor_parallel_size")
    ),
    Touch("lightning.pytorch.strategies.launchers", "_MultiProcessingLauncher"),
    Touch(
        "lightning.pytorch.trainer.connectors.signal_connector",
        "_SignalConnector._sigterm_notifier_fn(signum, frame)",
    ),
    Touch(
        "lightning.pytorch.trainer.connectors.signal_connector",
        "_SignalConnector._slurm_sigusr_handler_fn(signum, _)",
    ),
    Touch("lightning.pytorch.trainer.trainer", "Trainer._accelerator_connector"),
    Touch("lightning.pytorch.cli", "LightningCLI._instantiate_trainer(config, callbacks)"),
    Touch("lightning.pytorch.cli", "LightningCLI._add_subcommands(parser)"),
    Touch("lightning.pytorch.cli", "LightningCLI._prepare_subcommand_parser(klass, subcommand)"),
    Touch("lightning.pytorch.trainer.trainer", "Trainer._signal_connector"),
    Touch("lightning.pytorch.trainer.trainer", "Trainer._checkpoint_connector"),
    Touch("lightning.pytorch.loops.fit_loop", "_FitLoop._combined_loader"),
    Touch("lightning.pytorch.loops.fit_loop", "_FitLoop._data_source"),
    Touch("lightning.pytorch.loops.evaluation_loop", "_EvaluationLoop._data_source"),
    Touch("lightning.pytorch.loops.prediction_loop", "_PredictionLoop._data_source"),
    Touch("lightning.pytorch.trainer.call", "_call_configure_model(trainer)"),
    Touch(
        "lightning.pytorch.callbacks.progress.rich_progress",
        "RichProgressBar._get_train_description(current_epoch)",
    ),
    Touch("lightning.fabric.utilities.cloud_io", "_is_local_file_protocol(path)"),
    Touch("lightning.pytorch.plugins.precision.precision", "Precision.forward_context()"),
    Touch("lightning.pytorch.plugins.precision.precision", "Precision.train_step_context()"),
    Touch("lightning.pytorch.plugins.precision.precision", "Precision.convert_module(module)"),
    Touch("lightning.pytorch.strategies.strategy", "Strategy.connect(module)"),
    Touch("lightning.pytorch.loggers.wandb", "WandbLogger._name"),
    Touch("lightning.pytorch.loggers.wandb", "WandbLogger._log_model"),
)
"""Everything private, and what is public but not in Lightning's reference for users."""


def test_releases_that_run_code_are_not_allowed() -> None:
    allowed = requirement("lightning").specifier
    # 2.6.2 and 2.6.3 were malicious; a checkpoint ran code until 2.6.6
    assert not any(allowed.contains(f"2.6.{patch}") for patch in range(6))
    assert allowed.contains("2.6.6") and allowed.contains(version("lightning"))
    assert not allowed.contains("2.7.0")


@pytest.mark.parametrize("touch", TOUCHED, ids=lambda touch: touch.path)
def test_the_installed_release_has_what_we_touch(touch: Touch) -> None:
    source = Source(Path(lightning.__file__).parents[1])
    assert touch.holds(source.find(touch)), touch


def test_nothing_else_that_is_private_is_touched() -> None:
    known = {touch.path.rpartition(".")[2] for touch in TOUCHED}
    for path in PACKAGE.rglob("*.py"):
        if path.stem == "theirs":
            continue  # a trainer of TRL
        for name in private_names(ast.parse(path.read_text())):
            if hasattr(nn.Module, name):
                continue  # PyTorch's
            assert name in known, f"{path.name} touches Lightning's {name}: add it to the list"


def private_names(tree: ast.Module) -> set[str]:
    """Private names imported from Lightning, or reached through a trainer or a base class."""
    names = set()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imports = [node for node in imports if str(node.module).split(".")[0] == "lightning"]
    roots = ("trainer", "super()") if imports else ("trainer",)  # other classes have bases, too
    for node in ast.walk(tree):
        if node in imports:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            root = ast.unparse(node.value).removeprefix("self.").split(".")[0]
            names |= {node.attr} if root in roots else set()
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


@pytest.mark.parametrize(
    "code",
    [
        "from lightning.fabric.x import _secret",
        "trainer.fit_loop._secret",
        "self.trainer._secret",
        "from lightning import Callback\nsuper()._secret",
    ],
)
def test_private_names_are_seen(code: str) -> None:
    assert private_names(ast.parse(code)) == {"_secret"}
