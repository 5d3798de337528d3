"""The command `lit-rlsched fit | validate | test | predict | estimate`."""

import os
import sys
from typing import Any, Literal

# Before torch is loaded. As torchrun does: threads of several processes (trainer, reward workers)
# that wait for each other by spinning stall each other on a machine of few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What torch's C++ and vLLM's say below an error is about their sources, not about the run.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lit_rlsched import callbacks, engines
from lit_rlsched._malloc import keep_heap
from lit_rlsched.callbacks import (
    CompletionWriter,
    RNGState,
    RolloutCallback,
    RolloutProgressBar,
    RoundCheckpoint,
)
from lit_rlsched.checkpoints import with_atomic_io
from lit_rlsched.checks import check_one_process
from lit_rlsched.cli_best import refuse_best
from lit_rlsched.cli_errors import DebugOption, Parser, command_of, plain_warnings, refusals
from lit_rlsched.cli_folder import SaveConfig, keep_together, place
from lit_rlsched.cli_result import say_result, stoppable
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.estimate import Ledger, PlannedRun, device_memory, report
from lit_rlsched.gpu_setup import refuse_unseen_gpu
from lit_rlsched.module import PolicyModule
from lit_rlsched.platforms import require_posix

for _package in (callbacks, engines):  # short class names resolve among what is imported
    for _name in _package.__all__:
        getattr(_package, _name)


TITLES = {
    "trainer": "The Trainer: Lightning's settings",
    "model": "The model and how it learns: `GRPOModule`, `RLOOModule`",
    "data": "Prompts, rewards, the engine, and what a round is",
}
"""Of the groups in `--help`."""


class RolloutTrainer(Trainer):
    """Lightning's, with one more subcommand."""

    def estimate(
        self,
        model: LightningModule,
        datamodule: RolloutDataModule,
        memory: str | None = None,
        device: Literal["cpu", "cuda"] | None = None,
    ) -> None:
        """Print what the run would hold in memory, and how much more would fit; runs nothing.

        Args:
            model: The module of the run.
            datamodule: Its data module.
            memory: Memory of the device, such as `24GiB`. By default this machine's: all of its
                GPU's, or what is available now.
            device: What the run will train on. By default what `accelerator` says.
        """
        assert isinstance(model, PolicyModule)
        available = device_memory(device or "cpu", memory)
        print(report(Ledger(PlannedRun(self, model, datamodule, device or "cpu"), available)))


class RolloutCLI(LightningCLI):
    """Lightning's CLI with our defaults."""

    def __init__(self, run: "_Run", **kwargs: Any) -> None:
        self._run = run
        super().__init__(PolicyModule, RolloutDataModule, trainer_class=RolloutTrainer, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Our defaults; a config overrides them."""
        parser.add_argument(
            "--debug", action=DebugOption, help="Show the traceback where a run is refused."
        )
        parser.set_defaults(
            {
                "trainer.devices": 1,
                "trainer.num_sanity_val_steps": -1,  # the baseline, before anything is trained
                "trainer.log_every_n_steps": 1,
                "trainer.enable_model_summary": False,
            }
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for group, title in TITLES.items():
            parser.groups[group].title = title  # type: ignore[index]
        parser._action_groups[-1].title = f"Only for `{subcommand}`"  # what its method takes
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `estimate`."""
        return LightningCLI.subcommands() | {"estimate": {"model", "datamodule"}}

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the checkpoint's hyperparameters win over the config."""

    def before_instantiate_classes(self) -> None:
        """Let errors name the subcommand, and choose the folder of the run."""
        subcommand = str(self.subcommand)
        self._run.command = command_of(self._parser(subcommand))
        self._given, self._folder = self.config[subcommand].clone(), None
        if subcommand != "estimate":
            self._folder = place(self.config[subcommand], subcommand)

    def fit(self, **kwargs: Any) -> None:
        """Train; where a signal stops it, say how to go on, and exit with the signal's code."""
        with stoppable(self.trainer):
            self.trainer.fit(**kwargs)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        refuse_best(kwargs.get("ckpt_path"), self.trainer)
        if subcommand == "estimate" and kwargs["device"] is None:
            kwargs["device"] = self._device
        return kwargs

    def _instantiate_on_cpu(self, config: dict[str, Any]) -> None:
        """Let a machine without the run's GPU estimate it."""
        accelerator, devices = config["accelerator"], config["devices"]
        gpu = accelerator in ("gpu", "cuda")
        gpu |= accelerator == "auto" and torch.cuda.is_available()
        self._device = "cuda" if gpu else "cpu"
        config["devices"] = len(devices) if isinstance(devices, list) else devices
        config["accelerator"], config["logger"] = "cpu", False

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if self.subcommand == "estimate":
            self._instantiate_on_cpu(config)
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        config["callbacks"] = [self._run, *given]  # it knows before others fail
        given = [*given, *callbacks]
        if not any(isinstance(c, RNGState) for c in given):
            callbacks.append(RNGState())
        if config.get("enable_progress_bar") is not False and not any(
            isinstance(c, ProgressBar) for c in given
        ):
            callbacks.append(RolloutProgressBar())
        if self.subcommand == "predict" and not any(isinstance(c, CompletionWriter) for c in given):
            callbacks.append(CompletionWriter())
        saves = self.subcommand == "fit" and config["enable_checkpointing"] is not False
        if saves and not any(isinstance(c, RoundCheckpoint) for c in given):
            callbacks.append(RoundCheckpoint())  # the last one: it saves what the others know
        if self._folder is not None:
            keep_together(given, self._folder)
        config["plugins"] = with_atomic_io(config["plugins"])
        refuse_unseen_gpu(config["accelerator"])
        trainer = super()._instantiate_trainer(config, callbacks)
        check_one_process(trainer.world_size)  # before it starts the others
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveConfig):
                callback.config = self._given
        return trainer

    def after_predict(self) -> None:
        """Say where the completions are."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CompletionWriter):
                print(f"{callback.num_completions} completions in {callback.file(self.trainer)}")

    def after_fit(self) -> None:
        """Say what came of it in the last line."""
        say_result(self.trainer)


class _Run(RolloutCallback):
    """Knows how far the run is."""

    def __init__(self) -> None:
        self.command = "lit-rlsched"
        self.begun = False

    def on_round_start(self, *_: Any) -> None:
        """From here on an error is not about the configuration alone."""
        self.begun = True


def main(args: ArgsType = None) -> None:
    """Run the command line; `args` stands in for it in tests."""
    sys.path.insert(0, os.getcwd())  # reward functions live beside the config
    keep_heap()
    run, given = _Run(), sys.argv[1:] if args is None else args
    debug = isinstance(given, list) and "--debug" in given
    with plain_warnings(), refusals(debug, run):
        require_posix("`lit-rlsched`")
        RolloutCLI(
            run,
            parser_class=Parser,
            subclass_mode_model=True,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            auto_configure_optimizers=False,
            args=args,
        )
