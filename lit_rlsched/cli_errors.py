"""How the command line refuses a run: one message and exit code 2, without usage or traceback."""

import argparse
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lit_rlsched.cli_wording import plain
from lit_rlsched.refusals import is_refusal


class Refusal(SystemExit):
    """Ends the process with exit code 2, after `refusals` has printed the message.

    Args:
        message: What is wrong, with which value of which setting, and what to use instead.
        command: What lists the settings, such as `lit-rlsched fit`.
    """

    def __init__(self, message: str, command: str) -> None:
        super().__init__(2)
        self.message = message
        self.command = command


class Parser(LightningArgumentParser):
    """Lightning's, whose errors are one message. It takes no abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuse the command line or a configuration file.

        Raises:
            Refusal: always, unless jsonargparse only tries whether something parses.
        """
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        raise Refusal(plain(message, parser), command_of(parser)) from ex


class DebugOption(argparse.Action):
    """`--debug` in the help. It is no setting: `main` takes it from the command line itself."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        kwargs |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": 0}
        super().__init__(option_strings, **kwargs)

    def __call__(self, *_: Any) -> None:
        """Nothing to do."""


def command_of(parser: argparse.ArgumentParser) -> str:
    """What to put `--help` after."""
    return parser.prog.replace(" [options]", "")


@contextmanager
def refusals(debug: bool, run: Any) -> Iterator[None]:
    """Print one message where the run is refused; a bug keeps its traceback.

    Args:
        debug: Print the traceback of a refusal too.
        run: Says in `begun` whether the first round has begun, and in `command` what was called.

    Raises:
        Refusal: the run was refused.
    """
    try:
        try:
            yield
        except Exception as error:
            if run.begun or not is_refusal(error):
                raise
            raise Refusal(str(error), run.command) from error
    except Refusal as refusal:
        if debug:
            traceback.print_exception(refusal.__cause__ or refusal)
        tip = f"`{refusal.command} --help` lists the settings"
        more = "" if debug else ", `--debug` shows the traceback"
        print(f"error: {refusal.message}\ntip: {tip}{more}.", file=sys.stderr, flush=True)
        raise


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings without the path and the line of whoever called `warn`.

    Deprecations inside of other libraries are not shown, nor what Lightning advertises: whoever
    trains can do nothing about them. SIGTERM is answered as Ctrl-C is.
    """
    before = warnings.formatwarning
    rank_zero_module.log.addFilter(_is_no_advertisement)
    signal_connector.log.addFilter(_say_that_it_stops)
    with warnings.catch_warnings():
        for library in ("lightning", "torch", "transformers", "vllm"):
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category, module=rf"{library}\b")
        warnings.formatwarning = _format_warning
        try:
            yield
        finally:
            warnings.formatwarning = before
            rank_zero_module.log.removeFilter(_is_no_advertisement)
            signal_connector.log.removeFilter(_say_that_it_stops)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("💡 Tip")


def _say_that_it_stops(record: logging.LogRecord) -> bool:
    if "Received SIGTERM" in str(record.msg):
        record.msg = "SIGTERM: stopping and saving."
    return True


def _format_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    return f"{category.__name__}: {message}\n"
