"""Errors and warnings of the command line: one message and exit code 2 for a wrong setting.

`quick` finds most mistakes before the parser is made; here are those that only the parser finds.
"""

import argparse
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

import yaml
from jsonargparse import set_loader
from jsonargparse._loaders_dumpers import yaml_load
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lit_rlsched.cli.quick import Refusal, UniqueKeys
from lit_rlsched.settings import UsageError, constructor_arguments, did_you_mean


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
        raise Refusal(plain(message, parser), parser.prog.replace(" [options]", "")) from ex


class DebugOption(argparse.Action):
    """List `--debug` in the help but keep it out of the configuration; `main` looks for it."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        kwargs |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": 0}
        super().__init__(option_strings, **kwargs)

    def __call__(self, *_: Any) -> None:
        """Store nothing."""


class OnlyInFiles(argparse.Action):
    """Accept a setting in a configuration file and ignore it; on the command line it is unknown."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Refuse it as any unknown option."""
        parser.error(f"unrecognized arguments: {option}")


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
        refusal.command = max(refusal.command, run.command, key=len)
        refusal.show("" if debug else ", `--debug` shows the traceback")
        raise


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings without file and line, and hide those that a user cannot act on."""
    before = warnings.formatwarning
    for log in (logs := (rank_zero_module.log, signal_connector.log)):
        log.addFilter(_is_news)
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
        warnings.formatwarning = lambda text, kind, *_, **__: f"{kind.__name__}: {text}\n"
        try:
            yield
        finally:
            warnings.formatwarning = before
            for log in logs:
                log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of Lightning says something; that of SIGTERM becomes shorter."""
    if "Received SIGTERM" in str(record.msg):
        record.msg = "SIGTERM: stopping and saving."
    return not str(record.msg).startswith(("💡 Tip", "TPU available", "Loading `train_dataloader`"))


def plain(message: str, parser: argparse.ArgumentParser) -> str:
    """Return one line for an error of jsonargparse."""
    keys = re.findall(r'Parser key "([\w.]+)":', message)  # the outermost comes first
    key = ".".join(key for key in keys if key != "config")
    if match := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        shown = (a for a in parser._actions if a.help != argparse.SUPPRESS)
        options = [option for action in shown for option in action.option_strings]
        return f"There is no option `{match[1]}`.{did_you_mean(match[1], options)}"
    for pattern, say in _WORDINGS:
        if match := re.search(pattern, message, re.DOTALL):
            return say(match, key)
    text = message.partition("Errors:\n")[2].strip() or message
    first = re.split(r"\n\s*- |\n\s*Given value|\. Got value: Namespace", text)[0]
    *_, words = re.split(r'Parser key "[\w.]+":', first)
    words = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", words.removeprefix("- "))
    said, _, value = " ".join(words.split()).partition(". Got value: ")
    if not value and (match := re.search(r"Given value: ([^\n]*)", message)):
        value = match[1]
    given = f"={value}" if value else ""
    if kind := re.fullmatch(r"Expected a (?:typing\.Literal\[(.*)\]|(\w+))", said):
        choices = kind[1].split(", ") if kind[1] else [_TYPES.get(kind[2], kind[2])]
        said = f"must be {' or '.join(choices)}."
    return f"`{key}{given}`: {said}" if key else said


_TYPES = {
    **{"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"},
    **{"list": "a list", "dict": "a mapping", "NoneType": "null"},
}


def _no_argument(match: re.Match[str], key: str) -> str:
    path, name = match["path"], match["name"]
    if path == "lightning.LightningModule":
        return f"`{key}.{name}`: no class is named. Add it in front: `--{key}=GRPOModule`."
    module, _, class_name = path.rpartition(".")
    known, _ = constructor_arguments(getattr(import_module(module), class_name))
    near = did_you_mean(name, known).replace("`", f"`{key}.", 1)
    return f"There is no setting `{key}.{name}` of `{class_name}`.{near}"


def _no_import(match: re.Match[str], key: str) -> str:
    home, _, name = match["path"].rpartition(".")
    near = ""
    with suppress(ImportError, ValueError):
        near = did_you_mean(name, vars(import_module(home))).replace("`", f"`{home}.", 1)
    return f"`{key}={match['path']}`: {match['why']}.{near}"


def _missing(match: re.Match[str], key: str) -> str:
    names = match["names"].split(", ")
    # arguments of a class, or settings of a subcommand
    names = [f"{key}.{name}" if key else name.partition(".")[2] or name for name in names]
    listed = ", ".join(f"`{name}`" for name in names)
    return f"{listed} must be given: in a file (`--config run.yaml`) or as `--{names[0]}=...`."


_CLASS = r"class_path ?=?'(?P<path>[\w.]+)'"
_WHY = r"(?P<why>(?:module '[\w.]+' has no|No module named)[^\n]*?)"
_WORDINGS: tuple[tuple[str, Callable[[re.Match[str], str], str]], ...] = (
    (rf"{_CLASS}:\s+Option '(?P<name>\w+)' is not accepted", _no_argument),
    (rf"Option '(?P<name>\w+)' is not accepted.*?{_CLASS}", _no_argument),
    (rf"{_CLASS}:\s+{_WHY}\n", _no_import),
    (rf"{_WHY}\. Got value: (?:Namespace\(class_path=')?(?P<path>[\w.]+)", _no_import),
    (
        r"subclass of (?P<parent>\w+).*Given value: (?P<path>[^\n]*)",
        lambda match, key: f"`{key}={match['path']}`: must be a subclass of `{match['parent']}`.",
    ),
    (r"arguments are required: (?P<names>[^\n]+)", _missing),
)
"""Pattern of jsonargparse's message and the function that rewords it; the first match counts."""
