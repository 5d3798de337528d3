"""Seconds of rounds whose tools take time: free slots, held slots, turns in lockstep, and TRL.

    python -m benchmarks run environments

The task is that of the tools tutorial, with calls that sleep: seconds from a log-normal
distribution, the same in each row. 128 completions share 32 slots of vLLM; TRL decodes all of them
at once. Held slots and lockstep are this package with one rule changed. In the rows `own process`
engine and trainer have a core each: `seconds` are those of a round and its update. With `--made-up`
(not there) turns have lengths from a log-normal distribution (median 12 tokens), and a completion
has up to 16.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from benchmarks.common import run_module
from benchmarks.environments import ours, theirs

FIGURES = (
    *("seconds", "rollout", "tokens", "call_frequency", "decode_steps"),
    *("bubble_ratio", "wait_ratio", "prefill_tokens", "new_tokens"),
)


def measure(case: str, median: float, made_up: bool) -> dict[str, float]:
    """Run a row in a new process and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        module = "ours" if case in ours.CASES else "theirs"
        more = ["made-up"] if made_up else []
        run_module(f"environments.{module}", case, str(median), str(out), *more, name=case)
        figures: dict[str, float] = json.loads(out.read_text())
        return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all rows and print the table."""
    parser = results.parser("environments", __doc__)
    parser.add_argument(
        "--medians", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="seconds of a call"
    )
    results.add_cases(parser, [*ours.CASES, *theirs.CASES])
    parser.add_argument(
        "--made-up", action="store_true", help="turns of made-up lengths; this package alone"
    )
    options = results.parse(parser, arguments)
    if options.made_up:
        options.cases = [case for case in options.cases if case in ours.ALONE]
    print(f"| calls, ms | | {' | '.join(FIGURES)} |\n{'|---' * (len(FIGURES) + 2)}|")
    for median in options.medians:
        for case in options.cases:
            print(f"{case}, {median} s ...", file=sys.stderr, flush=True)
            figures = measure(case, median, options.made_up)
            results.add(f"{case}, {median} s{', made-up turns' * options.made_up}", figures)
            cells = [f"{figures[n]:.5g}" if n in figures else "" for n in FIGURES]
            print(f"| {1000 * median:g} | {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
