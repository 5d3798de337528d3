"""The subcommands `export` and `compare`, which need no settings of a run."""

from collections.abc import Callable

from lit_rlsched.cli.errors import DebugOption, Parser
from lit_rlsched.run.saving.export import export, find_checkpoint

COMPARE = "Draw runs beside each other: reward, accuracy, length and seconds."
"""Help of `compare`."""


def export_parser() -> Parser:
    """Return the parser of `lit-rlsched export`: the arguments of `export.export`."""
    parser = Parser(prog="lit-rlsched export", description=summary())
    parser.add_argument("--debug", action=DebugOption, help="Print the traceback of an error.")
    parser.add_function_arguments(export, as_group=False, fail_untyped=False, skip={"adapter"})
    parser.add_argument(  # a bool from the signature would need `--adapter=true`
        "--adapter",
        action="store_true",
        help="Write the LoRA adapters as a PEFT folder instead of merging them into the base.",
    )
    return parser


def summary() -> str:
    """Return the first line of the function's docstring."""
    return str(export.__doc__).partition("\n")[0]


def compare_parser() -> Parser:
    """Return the parser of `lit-rlsched compare`."""
    parser = Parser(prog="lit-rlsched compare", description=COMPARE)
    parser.add_argument("--debug", action=DebugOption, help="Print the traceback of an error.")
    parser.add_argument("runs", nargs="+", help="Folders of runs (`runs/quickstart/version_0`).")
    parser.add_argument(
        "--out", default="comparison.png", help="File of the picture: .png, .svg or .pdf."
    )
    return parser


def _compare(args: list[str]) -> None:
    from lit_rlsched.callbacks.pictures.comparison import compare  # imports matplotlib

    given = compare_parser().parse_args(args)
    print(f"The picture of {len(given.runs)} runs is `{compare(given.runs, given.out)}`.")


def _export(args: list[str]) -> None:
    given = export_parser().parse_args(args)
    given.ckpt_path = str(find_checkpoint(given.ckpt_path))
    folder = export(**given.as_dict())
    print(f"The model of `{given.ckpt_path}` is in `{folder}`.", flush=True)


COMMANDS: dict[str, Callable[[list[str]], None]] = {"export": _export, "compare": _compare}
"""What runs a subcommand with its arguments."""
