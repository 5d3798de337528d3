"""Errors and warnings of the command line: one message and exit code 2 for a wrong setting."""

import argparse
import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import yaml
from jsonargparse import set_loader
from jsonargparse._loaders_dumpers import yaml_load
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lit_rlsched.cli.config_files import UniqueKeys
from lit_rlsched.cli.quick import Refusal
from lit_rlsched.cli.wording import plain
from lit_rlsched.settings import UsageError


def _load(text: str) -> Any:
    yaml.compose(text, Loader=UniqueKeys)
    return yaml_load(text)


set_loader("yaml", _load, (yaml.YAMLError,))


class Parser(LightningArgumentParser):
    """Lightning's parser without abbreviated options. It reports an error as a `Refusal`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report an error in the command line or in a configuration file."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        raise Refusal(plain(message, parser), command_of(parser)) from ex


class DebugOption(argparse.Action):
    """List `--debug` in the help but keep it out of the configuration; `main` looks for it."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        kwargs |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": 0}
        super().__init__(option_strings, **kwargs)

    def __call__(self, *_: Any) -> None:
        """Store nothing."""


class OnlyInFiles(argparse.Action):
    """Accept a setting in a configuration file and ignore it; on the command line it is unknown."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        hidden = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(option_strings, dest, **(kwargs | hidden))

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Refuse it as any unknown option."""
        parser.error(f"unrecognized arguments: {option}")


def command_of(parser: argparse.ArgumentParser) -> str:
    """Return the command that a parser belongs to, such as `lit-rlsched fit`."""
    return parser.prog.replace(" [options]", "")


@contextmanager
def refusals(debug: bool, run: Any) -> Iterator[None]:
    """Print one message for what the user can mend; any other error keeps its traceback."""
    try:
        try:
            yield
        except (UsageError, MisconfigurationException) as error:
            raise Refusal(str(error), run.command) from error
    except Refusal as refusal:
        if debug:
            traceback.print_exception(refusal.__cause__ or refusal)
        refusal.show("" if debug else ", `--debug` shows the traceback")
        raise


@contextmanager
def of_arguments() -> Iterator[None]:
    """Turn errors of constructors, Lightning's and jsonargparse's included, into a `UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        cause = error.__cause__  # where jsonargparse has tried other types too
        raise UsageError(str(cause if isinstance(cause, UsageError) else error)) from error


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings without file and line, and shorten what Lightning says.

    Warnings about other libraries' code and Lightning's messages about every run are hidden:
    somebody who trains a model cannot act on them.
    """
    before = warnings.formatwarning
    rank_zero_module.log.addFilter(_is_news)
    signal_connector.log.addFilter(_shorten_sigterm)
    with warnings.catch_warnings():
        for library in ("lightning", "torch", "transformers", "vllm"):
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category, module=rf"{library}\b")
        if "SLURM_JOB_ID" not in os.environ:  # where SLURM is installed, Lightning says to use it
            warnings.filterwarnings("ignore", message="The `srun` command is available")
        # given when Python compiles a module, as in the first run after an installation
        warnings.filterwarnings(
            "ignore", category=SyntaxWarning, module=r".*\b(site|dist)-packages\b"
        )
        warnings.formatwarning = _format_warning
        try:
            yield
        finally:
            warnings.formatwarning = before
            rank_zero_module.log.removeFilter(_is_news)
            signal_connector.log.removeFilter(_shorten_sigterm)


def _format_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    return f"{category.__name__}: {message}\n"


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(("💡 Tip", "TPU available", "Loading `train_dataloader`"))


def _shorten_sigterm(record: logging.LogRecord) -> bool:
    if "Received SIGTERM" in str(record.msg):
        record.msg = "SIGTERM: stopping and saving."
    return True
