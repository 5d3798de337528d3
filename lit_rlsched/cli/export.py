"""The subcommands without settings of a run: `export`, `convert`, `calibrate` ..."""

from collections.abc import Callable, Collection

from lit_rlsched.cli.errors import DebugOption, Parser
from lit_rlsched.run.saving.export import export, find_checkpoint
from lit_rlsched.run.saving.gguf import convert


def export_parser() -> Parser:
    """Return the parser of `lit-rlsched export`: the arguments of `export.export`."""
    parser = _parser_of(export, skip={"adapter"})
    parser.add_argument(  # a bool from the signature would need `--adapter=true`
        "--adapter",
        action="store_true",
        help="Write the LoRA adapters as a PEFT folder instead of merging them into the base.",
    )
    return parser


def convert_parser() -> Parser:
    """Return the parser of `lit-rlsched convert`: the arguments of `gguf.convert`."""
    return _parser_of(convert)


def calibrate_parser() -> Parser:
    """Return the parser of `lit-rlsched calibrate`: the arguments of `simulate.calibrate`."""
    parser = _parser("calibrate", "Fit what decode steps, updates and rewards cost in a run.")
    parser.add_argument("run", help="Folder of the run (`runs/quickstart/version_0`).")
    return parser


def simulate_parser() -> Parser:
    """Return the parser of `lit-rlsched simulate`: the arguments of `simulate.simulate`."""
    from lit_rlsched.cli.simulate import simulate

    return _parser_of(simulate)


def report_parser() -> Parser:
    """Return the parser of `lit-rlsched report`: the arguments of `report.report`."""
    from lit_rlsched.cli.report import report

    parser = _parser_of(report, skip={"runs"})
    parser.add_argument("runs", nargs="+", help="Folders of runs (`runs/quickstart/version_0`).")
    return parser


def _parser(name: str, about: str) -> Parser:
    parser = Parser(prog=f"lit-rlsched {name}", description=about)
    parser.add_argument("--debug", action=DebugOption, help="Print the traceback of an error.")
    return parser


def _parser_of(function: Callable[..., object], skip: Collection[str] = ()) -> Parser:
    """Return a parser with the arguments of a function."""
    parser = _parser(function.__name__, str(function.__doc__).partition("\n")[0])
    parser.add_function_arguments(function, as_group=False, fail_untyped=False, skip={*skip})
    return parser


PARSERS = {
    "export": export_parser,
    "convert": convert_parser,
    "calibrate": calibrate_parser,
    "simulate": simulate_parser,
    "report": report_parser,
}
"""What makes the parser of a subcommand."""


def _export(args: list[str]) -> None:
    given = export_parser().parse_args(args)
    given.ckpt_path = str(find_checkpoint(given.ckpt_path))
    folder = export(**given.as_dict())
    print(f"The model of `{given.ckpt_path}` is in `{folder}`.", flush=True)


def _convert(args: list[str]) -> None:
    given = convert_parser().parse_args(args)
    print(f"The model of `{given.file}` is in `{convert(**given.as_dict())}`.", flush=True)


def _calibrate(args: list[str]) -> None:
    from lit_rlsched.cli.simulate import calibrate

    print(calibrate(calibrate_parser().parse_args(args).run))


def _simulate(args: list[str]) -> None:
    from lit_rlsched.cli.simulate import simulate

    print(simulate(**simulate_parser().parse_args(args).as_dict()))


def _report(args: list[str]) -> None:
    from lit_rlsched.cli.report import report

    page, trace = report(**report_parser().parse_args(args).as_dict())
    print(f"The report is `{page}`: open it in a browser.")
    if trace is not None:
        print(f"The trace is `{trace}`: open it at https://ui.perfetto.dev.")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "export": _export,
    "convert": _convert,
    "calibrate": _calibrate,
    "simulate": _simulate,
    "report": _report,
}
"""What runs a subcommand with its arguments."""
