"""The subcommand `export`, which needs no settings of a run."""

from lit_rlsched.cli_errors import DebugOption, Parser
from lit_rlsched.export import export, find_checkpoint


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


def main(args: list[str]) -> None:
    """Run `lit-rlsched export` with these arguments."""
    given = export_parser().parse_args(args)
    given.ckpt_path = str(find_checkpoint(given.ckpt_path))
    folder = export(**given.as_dict())
    print(f"The model of `{given.ckpt_path}` is in `{folder}`.", flush=True)
