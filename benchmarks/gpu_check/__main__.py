"""Run the checks and write the report: `python -m benchmarks run gpu-check`."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import results
from benchmarks.gpu_check import report
from benchmarks.gpu_check.checks import CHECKS
from benchmarks.gpu_check.runner import Check, Result, exit_code, run_checks
from benchmarks.gpu_check.setting import QUICK_TASK, Setting

PATIENCE = 4
"""Factor on the time limits of the checks on a CPU."""


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = results.parser("gpu-check", __doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="names of checks; `tiny` stands for all `tiny-*`"
    )
    parser.add_argument("--list", action="store_true", help="print the checks and run nothing")
    parser.add_argument(
        "--model", help="checkpoint to use instead of random weights of Qwen3-0.6B's shape"
    )
    parser.add_argument("--out", default="runs/gpu-check", help="folder for reports and models")
    return results.parse(parser, args)


def chosen(only: list[str] | None) -> list[Check]:
    """Return the checks with these names in their order.

    Raises:
        SystemExit: there is no such check.
    """
    if only is None:
        return CHECKS
    for name in only:
        if not any(_is(check, name) for check in CHECKS):
            sys.exit(f"`--only {name}`: no such check. See `--list`.")
    return [check for check in CHECKS if any(_is(check, name) for name in only)]


def _is(check: Check, name: str) -> bool:
    return check.name == name or check.name.startswith(f"{name}-")


def main(args: Sequence[str] | None = None) -> int:
    """Run the checks. The exit code is 1 if one fails."""
    options = parse(args)
    checks = chosen(options.only)
    if options.list:
        for check in checks:
            print(
                f"{check.name:20} {check.planned:4.0f} s, at most {check.limit:4.0f}  {check.shows}"
            )
        print(f"{sum(check.planned for check in checks) / 60:.0f} minutes as planned on an H100")
        return 0
    if not Path(QUICK_TASK).is_dir():
        sys.exit(f"`{QUICK_TASK}` is not here. Run it from the root of the repository.")
    folder = Path(options.out, time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    folder.mkdir(parents=True)
    models = str(Path(options.out, "models").absolute())
    setting = Setting(options.device, str(folder), models, options.model)
    if options.device == "cpu":
        checks = [replace(check, limit=PATIENCE * check.limit) for check in checks]
    found: list[Result] = []

    def done(result: Result) -> None:
        found.append(result)
        figures = {figure.name: figure.value for figure in result.findings.figures}
        results.add(
            result.check.name, {"status": result.status, "seconds": result.seconds, **figures}
        )
        print(report.line(result, len(found), len(checks)), flush=True)
        report.write(found, folder, options.device)

    run_checks(checks, setting, done)
    print(f"{report.summary(found)}; report: {folder / 'report.md'}")
    if options.device == "cpu":
        print(f"On CPU {report.REHEARSED}.")
    return exit_code(found)


if __name__ == "__main__":
    sys.exit(main())
