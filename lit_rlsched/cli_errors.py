"""How the command line refuses a run: one message and exit code 2, without usage or traceback."""

import argparse
import dis
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lit_rlsched.cli_wording import plain

_ON_PURPOSE = (ValueError, TypeError, OSError, ImportError, RuntimeError, MisconfigurationException)
_SPEAK_TO_USERS = ("lit_rlsched", "lightning", "jsonargparse")


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


def is_refusal(error: Exception) -> bool:
    """Whether an error tells the user what to change, and is no bug.

    It does where it was raised by a `raise` in this package or in Lightning: what Python, torch or
    vLLM raise by themselves, an `assert` that fails, and the user's own code are not among these.
    """
    if not isinstance(error, _ON_PURPOSE) or isinstance(error, NotImplementedError):
        return False
    if hasattr(error, "__notes__"):  # the traceback of another process
        return False
    last = _innermost(error.__traceback__)
    if last is None:
        return False
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    operation = last.tb_frame.f_code.co_code[last.tb_lasti]
    return module.partition(".")[0] in _SPEAK_TO_USERS and operation == dis.opmap["RAISE_VARARGS"]


def _innermost(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings without the path and the line of whoever called `warn`.

    Deprecations inside of other libraries are not shown, nor what Lightning advertises: whoever
    trains can do nothing about them.
    """
    before = warnings.formatwarning
    rank_zero_module.log.addFilter(_is_no_advertisement)
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


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("💡 Tip")


def _format_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    return f"{category.__name__}: {message}\n"
