"""The subcommands without settings of a run: `export`, `convert`, `calibrate` ..."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.cli.errors import DebugOption, Parser
from lit_rlsched.run.saving.export import export, find_checkpoint
from lit_rlsched.run.saving.gguf import convert
from lit_rlsched.settings import UsageError

_HELP = "Folder of the run (`runs/quickstart/version_0`)."
_OWN: dict[str, dict[str, dict[str, Any]]] = {
    "export": {  # a bool from the signature would need `--adapter=true`
        "--adapter": {
            "action": "store_true",
            "help": "Write the LoRA adapters as a PEFT folder instead of merging them into the "
            "base.",
        }
    },
    "calibrate": {"run": {"help": _HELP}},
    "report": {"runs": {"nargs": "+", "help": "Folders of runs (`runs/quickstart/version_0`)."}},
}
"""Arguments that are not made from the function's signature."""


def _export(ckpt_path: str, **settings: Any) -> str:
    checkpoint = find_checkpoint(ckpt_path)
    return f"The model of `{checkpoint}` is in `{export(str(checkpoint), **settings)}`."


def _convert(file: str, **settings: Any) -> str:
    return f"The model of `{file}` is in `{convert(file, **settings)}`."


def _report(**settings: Any) -> str:
    page, trace = report(**settings)
    said = f"The report is `{page}`: open it in a browser."
    shown = f"\nThe trace is `{trace}`: open it at https://ui.perfetto.dev."
    return said + shown if trace is not None else said


def report(
    runs: Sequence[str], out: str | None = None, perfetto: str | None = None
) -> tuple[Path, Path | None]:
    """Write the report of one or more runs: a page that needs no network.

    Args:
        runs: Folders of the runs.
        out: File of the page. By default `report.html` in the folder of the only run, or here.
        perfetto: File for the timelines as a trace for https://ui.perfetto.dev: .json or .json.gz.
    """
    from lit_rlsched.callbacks.report.collect import run_data
    from lit_rlsched.callbacks.report.page import FILE, write_report, write_trace
    from lit_rlsched.callbacks.what_if import about_of
    from lit_rlsched.cli.simulate import facts_of
    from lit_rlsched.scheduling.trace_files import Traces

    if out is not None and Path(out).suffix != ".html":
        raise UsageError(f"`--out {out}`: use a name in .html.")
    if perfetto is not None and not perfetto.endswith((".json", ".json.gz")):
        raise UsageError(f"`--perfetto {perfetto}`: use a name in .json or .json.gz.")
    data = [run_data(run, facts_of(about_of(Traces(run))), share=1 / len(runs)) for run in runs]
    folder = Path(data[0]["folder"]) if len(runs) == 1 else Path()
    page = folder / FILE if out is None else Path(out)
    write_report(page, data)
    return page, None if perfetto is None else write_trace(perfetto, data)


def _simulation(name: str) -> Callable[..., str]:
    from lit_rlsched.cli import simulate

    return getattr(simulate, name)


COMMANDS: dict[str, Callable[[], tuple[Callable[..., object], Callable[..., str]]]] = {
    "export": lambda: (export, _export),
    "convert": lambda: (convert, _convert),
    "calibrate": lambda: (_simulation("calibrate"), _simulation("calibrate")),
    "simulate": lambda: (_simulation("simulate"), _simulation("simulate")),
    "report": lambda: (report, _report),
}
"""For each subcommand the function whose arguments it has, and what says what it has done."""


def parser_of(name: str) -> Parser:
    """Return the parser of a subcommand."""
    function, own = COMMANDS[name]()[0], _OWN.get(name, {})
    parser = Parser(prog=f"lit-rlsched {name}", description=str(function.__doc__).split("\n")[0])
    parser.add_argument("--debug", action=DebugOption, help="Print the traceback of an error.")
    skip: set[str | int] = {argument.strip("-") for argument in own}
    parser.add_function_arguments(function, as_group=False, fail_untyped=False, skip=skip)
    for argument, settings in own.items():
        parser.add_argument(argument, **settings)
    return parser


def run(name: str, args: list[str]) -> None:
    """Run a subcommand with its arguments."""
    given = parser_of(name).parse_args(args)
    print(COMMANDS[name]()[1](**given.as_dict()), flush=True)
