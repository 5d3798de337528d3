"""The command line: `lit-rlsched fit | validate | test | predict | estimate | export`."""

import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

# Set before torch is imported. One thread per process, as torchrun does: the trainer and the reward
# workers share the cores, and OpenMP threads that spin while they wait slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The C++ warnings of torch and vLLM concern their source code, not the run.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
if not sys.stderr.isatty():  # bars of downloads and of weights that are read would fill a log
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rlsched import engines
from lit_rlsched.callbacks import (
    CompletionWriter,
    RNGState,
    RolloutLogger,
    RolloutProgressBar,
    RoundCheckpoint,
)
from lit_rlsched.callbacks.what_if import about_of
from lit_rlsched.cli.errors import DebugOption, OnlyInFiles, Parser, plain_warnings, refusals
from lit_rlsched.cli.estimate import PlannedRun, device_memory, report
from lit_rlsched.cli.folder import SaveConfig, choose_folder, keep_together
from lit_rlsched.cli.simulate import facts_of, simulate
from lit_rlsched.cli.summary import RunSummary, next_commands, resume_command
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines.devices import refuse_missing_gpus, refuse_unseen_gpu
from lit_rlsched.module import PolicyModule
from lit_rlsched.processes import keep_heap, require_posix
from lit_rlsched.run.checks import check_trainer
from lit_rlsched.run.interrupts import listening, was_requeued
from lit_rlsched.run.saving.checkpoints import with_atomic_io
from lit_rlsched.run.saving.export import export, find_checkpoint
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError

# The package imports its classes on first use; the parser finds imported classes by short name.
for _name in engines.__all__:
    getattr(engines, _name)

C = TypeVar("C", bound=Callback)

TITLES = {
    "trainer": "Settings of Lightning's Trainer",
    "model": "The policy and its loss (`GRPOModule`, `RLOOModule`)",
    "data": "Prompts, rewards, engine and rounds",
}
"""Headings of the groups of settings in `--help`."""

ABOUT = {
    "fit": "Train: draw rounds of completions, score them and take optimizer steps.",
    "validate": "Answer the held-out prompts of `data.val_data` and print accuracy and rewards.",
    "test": "Answer the prompts of `data.test_data` and print accuracy and rewards.",
    "predict": "Answer the prompts of `data.predict_data` and write the completions to a file.",
}
"""What Lightning's commands do here."""

HELP = {
    "seed_everything": "Seed of Python, NumPy and torch; `true` draws one.",
    "ckpt_path": "Checkpoint: a file, or `last` for the newest one of the newest run with these "
    "configuration files. `fit` resumes the run from it, the other commands use its weights.",
    "weights_only": "Passed to `torch.load`: `true` refuses a checkpoint that holds anything but "
    "tensors and primitive types.",
    "return_predictions": "Whether Lightning keeps all predictions in memory until the end. They "
    "are written to a file in any case.",
    "verbose": "Whether to print the metrics at the end.",
}
"""Help of Lightning's own settings, where this command line treats them in its own way."""

OF_A_COMMAND = {
    *("ckpt_path", "weights_only", "verbose", "return_predictions"),  # Lightning's
    *("memory", "device"),  # of `estimate`
}
"""Settings of some subcommands. The others ignore them in a file, so one file serves them all."""


class RolloutTrainer(Trainer):
    """Lightning's Trainer with the subcommand `estimate`."""

    def estimate(
        self,
        model: LightningModule,
        datamodule: RolloutDataModule,
        memory: str | None = None,
        device: Literal["cpu", "cuda"] | None = None,
    ) -> None:
        """Print how much memory the run will hold, and what helps if that is too much.

        Nothing is trained and no weights are loaded.

        Args:
            model: Module of the run.
            datamodule: Data module of the run.
            memory: Memory of the device, with its unit, such as `24GiB`. By default the total
                memory of this machine's GPU, or on a CPU the memory that is available now.
            device: Device that the run will train on. By default it follows from
                `trainer.accelerator`.
        """
        if not isinstance(model, PolicyModule):
            raise UsageError(
                f"`model={type(model).__name__}`: the passes of your own module are not known, so "
                "their memory cannot be estimated. Use `GRPOModule` or `RLOOModule`."
            )
        device = device or "cpu"
        print(report(PlannedRun(self, model, datamodule, device, device_memory(device, memory))))


class RolloutCLI(LightningCLI):
    """Lightning's command line with this package's defaults, callbacks and run folders."""

    def __init__(self, run: SimpleNamespace, **kwargs: Any) -> None:
        self._run = run
        super().__init__(LightningModule, RolloutDataModule, trainer_class=RolloutTrainer, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--debug`."""
        parser.add_argument(
            "--debug", action=DebugOption, help="Print the traceback of an error in the settings."
        )

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        # for `--help` alone: `main` runs it before Lightning asks for a module and data
        listed = parser._subcommands_action
        assert listed is not None
        for name in COMMANDS:
            made = _parser_of(name)
            listed.add_subcommand(name, made, help=made.description)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.description = ABOUT.get(subcommand, parser.description)
        for group, title in TITLES.items():
            parser.groups[group].title = title  # type: ignore[index]
        parser._action_groups[-1].title = f"Settings of `{subcommand}` itself"
        for action in parser._actions:
            action.help = HELP.get(action.dest, action.help)
        taken = {action.dest for action in parser._actions}
        for name in sorted(OF_A_COMMAND - taken):
            parser.add_argument(f"--{name}", action=OnlyInFiles, help=SUPPRESS, default=SUPPRESS)
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's subcommands and `estimate`."""
        return LightningCLI.subcommands() | {"estimate": {"model", "datamodule"}}

    def _parse_ckpt_path(self) -> None:
        """Skip Lightning's step: hyperparameters of a checkpoint would override the config."""

    def before_instantiate_classes(self) -> None:
        """Tell errors which subcommand runs, and choose the folder of the run."""
        subcommand = str(self.subcommand)
        self._run.command = f"lit-rlsched {subcommand}"
        config = self.config[subcommand]
        self._given, self._folder = config.clone(), None
        if subcommand != "estimate":
            self._folder = choose_folder(config, subcommand)
            return
        trainer = config.trainer
        gpu = trainer.accelerator in ("gpu", "cuda")
        gpu |= trainer.accelerator == "auto" and torch.cuda.is_available()
        config.device = config.device or ("cuda" if gpu else "cpu")
        if isinstance(trainer.devices, list):  # indices of GPUs
            trainer.devices = len(trainer.devices)
        # so that a machine without the run's GPU can estimate it
        trainer.accelerator, trainer.logger = "cpu", False

    def instantiate_classes(self) -> None:
        """Make the objects of the configuration; an error is about their arguments."""
        try:
            super().instantiate_classes()
        except UsageError:
            raise
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            cause = error.__cause__  # where jsonargparse has tried other types too
            raise UsageError(str(cause if isinstance(cause, UsageError) else error)) from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        given = config["callbacks"] or []
        given = [*(given if isinstance(given, list) else [given]), *callbacks]

        def lacks(kind: type[Callback]) -> bool:
            return not any(isinstance(callback, kind) for callback in given)

        self._talks = config.get("enable_progress_bar") is not False
        if lacks(RNGState):
            callbacks.append(RNGState())
        if self._talks and lacks(ProgressBar):
            callbacks.append(RolloutProgressBar())
        if self.subcommand == "predict" and lacks(CompletionWriter):
            callbacks.append(CompletionWriter())
        if self.subcommand == "fit" and self._talks:
            callbacks.append(RunSummary())
        saves = self.subcommand == "fit" and config["enable_checkpointing"] is not False
        if saves and lacks(RoundCheckpoint):
            callbacks.append(RoundCheckpoint())  # last, so that it saves the state of the others
        if self._folder is not None:
            keep_together(given, self._folder)
        config["plugins"] = with_atomic_io(config["plugins"])
        refuse_unseen_gpu(config["accelerator"])
        refuse_missing_gpus(config["accelerator"], config["devices"])
        self.trainer = super()._instantiate_trainer(config, callbacks)
        check_trainer(self.trainer)  # before the Trainer starts other processes
        for callback in self._callbacks(SaveConfig):
            callback.config = self._given
        return self.trainer

    def fit(self, **kwargs: Any) -> None:
        """Train; a run that SIGTERM or Ctrl-C stopped exits with the code of the signal."""
        with listening(self.trainer) as signals:
            try:
                self.trainer.fit(**kwargs)
            except SIGTERMException:
                if self.trainer.is_global_zero:
                    self._report_stop()
                raise SystemExit(signals.exit_code) from None
            except (SystemExit, KeyboardInterrupt):
                if not signals.interrupts:
                    raise
                # Lightning exits with code 1 after Ctrl-C
                raise SystemExit(signals.exit_code) from None

    def _report_stop(self) -> None:
        for callback in self._callbacks(RolloutLogger):
            callback.on_fit_end(self.trainer, self.trainer.lightning_module)
        self._print_result()
        if was_requeued(self.trainer):
            print("The run was saved, and goes on when SLURM starts the job again.", flush=True)
            return
        command = resume_command(self.trainer)
        how = f"Resume it with `{command}`." if command else "Nothing was saved."
        print(f"The run was stopped before its end. {how}", flush=True)

    def after_fit(self) -> None:
        """Print the result of the run and what can be done with it next."""
        if not self.trainer.is_global_zero:
            return
        self._print_result()
        if self._talks and (commands := next_commands(self.trainer)):
            print("Next:", *commands, sep="\n  ", flush=True)

    def _print_result(self) -> None:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()  # otherwise it prints when the process exits
        for callback in self._callbacks(RolloutLogger):
            print(callback.summary(self.trainer), flush=True)

    def after_predict(self) -> None:
        """Print where the completions were written."""
        for callback in self._callbacks(CompletionWriter) if self.trainer.is_global_zero else ():
            print(f"{callback.num_completions} completions in {callback.file(self.trainer)}")

    def _callbacks(self, kind: type[C]) -> Iterator[C]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return (callback for callback in callbacks if isinstance(callback, kind))


_OWN: dict[str, dict[str, dict[str, Any]]] = {
    "export": {  # a bool from the signature would need `--adapter=true`
        "--adapter": {
            "action": "store_true",
            "help": "Write the LoRA adapters as a PEFT folder instead of merging them into the "
            "base.",
        }
    },
    "report": {"runs": {"nargs": "+", "help": "Folders of runs (`runs/quickstart/version_0`)."}},
}
"""Arguments that are not made from the function's signature."""


def _export(ckpt_path: str, **settings: Any) -> str:
    checkpoint = find_checkpoint(ckpt_path)
    return f"The model of `{checkpoint}` is in `{export(str(checkpoint), **settings)}`."


def _report(runs: Sequence[str], out: str | None = None) -> str:
    """Write the report of one or more runs: a page that needs no network.

    Args:
        runs: Folders of the runs.
        out: File of the page. By default `report.html` in the folder of the only run, or here.
    """
    from lit_rlsched.callbacks.report.collect import run_data
    from lit_rlsched.callbacks.report.page import FILE, write_report

    if out is not None and Path(out).suffix != ".html":
        raise UsageError(f"`--out {out}`: use a name in .html.")
    data = [run_data(run, facts_of(about_of(Traces(run))), share=1 / len(runs)) for run in runs]
    folder = Path(data[0]["folder"]) if len(runs) == 1 else Path()
    page = folder / FILE if out is None else Path(out)
    write_report(page, data)
    return f"The report is `{page}`: open it in a browser."


COMMANDS: dict[str, tuple[Callable[..., object], Callable[..., str]]] = {
    "export": (export, _export),
    "simulate": (simulate, simulate),
    "report": (_report, _report),
}
"""For each subcommand without settings of a run the function whose arguments it has, and what says
what it has done."""


def _parser_of(name: str) -> Parser:
    """Return the parser of a subcommand without settings of a run."""
    function, own = COMMANDS[name][0], _OWN.get(name, {})
    parser = Parser(prog=f"lit-rlsched {name}", description=str(function.__doc__).split("\n")[0])
    parser.add_argument("--debug", action=DebugOption, help="Print the traceback of an error.")
    skip: set[str | int] = {argument.strip("-") for argument in own}
    parser.add_function_arguments(function, as_group=False, fail_untyped=False, skip=skip)
    for argument, settings in own.items():
        parser.add_argument(argument, **settings)
    return parser


def main(args: ArgsType = None) -> None:
    """Run the command line with these arguments, or those of `sys.argv`."""
    sys.path.insert(0, os.getcwd())  # finds reward functions in modules of the working directory
    keep_heap()
    run, given = SimpleNamespace(command="lit-rlsched"), sys.argv[1:] if args is None else args
    debug = isinstance(given, list) and "--debug" in given
    with plain_warnings(), refusals(debug, run):
        require_posix("`lit-rlsched`")
        if isinstance(given, list) and given and not given[0].startswith("-"):
            run.command = f"lit-rlsched {given[0]}"
        if isinstance(given, list) and given and given[0] in COMMANDS:
            settings = _parser_of(given[0]).parse_args(given[1:]).as_dict()
            return print(COMMANDS[given[0]][1](**settings), flush=True)
        RolloutCLI(
            run,
            parser_class=Parser,
            parser_kwargs={"prog": "lit-rlsched"},  # also as `python -m lit_rlsched`
            trainer_defaults={  # a configuration file overrides them
                "devices": 1,
                "num_sanity_val_steps": -1,  # measures the baseline before training
                "log_every_n_steps": 1,
                "enable_model_summary": False,
            },
            subclass_mode_model=True,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            auto_configure_optimizers=False,
            args=args,
        )
