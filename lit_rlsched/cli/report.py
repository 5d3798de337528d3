"""The subcommand `report`: one page about runs."""

from collections.abc import Sequence
from pathlib import Path

from lit_rlsched.callbacks.report.collect import run_data
from lit_rlsched.callbacks.report.page import FILE, write_report, write_trace
from lit_rlsched.callbacks.what_if import about_of
from lit_rlsched.cli.simulate import facts_of
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError


def report(
    runs: Sequence[str], out: str | None = None, perfetto: str | None = None
) -> tuple[Path, Path | None]:
    """Write the report of one or more runs: a page that needs no network.

    Args:
        runs: Folders of the runs.
        out: File of the page. By default `report.html` in the folder of the only run, or here.
        perfetto: File for the timelines as a trace for https://ui.perfetto.dev: .json or .json.gz.

    Returns:
        The page, and the trace if one was asked for.

    Raises:
        UsageError: a folder has no traces of a whole round, or a file has another ending.
    """
    if out is not None and Path(out).suffix != ".html":
        raise UsageError(f"`--out {out}`: use a name in .html.")
    if perfetto is not None and not perfetto.endswith((".json", ".json.gz")):
        raise UsageError(f"`--perfetto {perfetto}`: use a name in .json or .json.gz.")
    data = [run_data(run, facts_of(about_of(Traces(run))), share=1 / len(runs)) for run in runs]
    folder = Path(data[0]["folder"]) if len(runs) == 1 else Path()
    page = folder / FILE if out is None else Path(out)
    write_report(page, data)
    return page, None if perfetto is None else write_trace(perfetto, data)
