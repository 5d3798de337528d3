"""Claims of the papers in seconds of a real chat model, on real vLLM.

    make real-model
    python -m benchmarks run papers

Each row trains some rounds of a schedule in a process of its own and appends its figures to
`benchmarks/results/papers.csv`. Rows that are already there, for this CPU and seed and with as many
repeats, are not measured again, unless `--again` is given. Lengths are the model's own: all rows
replay those of `lengths.csv`. All rewards of a group differ, so that each schedule has the same
update to compute. In the rows that begin with `rollout` rewards are equal, so that a round is its
rollout and its verification.

The rows of a shape are simulated with the lengths and costs of its plain row, when that is measured
here: `simulated` with its costs, `h100` with those that `lit-rlsched simulate --gpu h100` computes
for a model of 1.5 billion parameters.
"""

import json
import shutil
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import truediv
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import results
from benchmarks.common import run_module
from benchmarks.papers.rows import MODEL, ROWS, SHAPES, Row
from lit_rlsched.callbacks.what_if import Setting, about_of, beside
from lit_rlsched.cli.simulate import DEFAULTS, facts_of
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import Costs, calibrated, computed
from lit_rlsched.simulation.pipeline import Machine
from lit_rlsched.simulation.workload import Workload

ROUNDS = 8
"""Simulated rounds, and those that lengths and costs come from."""
FIGURES = (
    "seconds",
    "cpu_seconds",
    "rollout",
    "decode_steps",
    "tokens",
    "trained_tokens",
    "peak_kv_tokens",
    "peak_mib",
)
"""Figures of the table, each the mean of a round."""


def measured(seed: int, cpu: str | None = None) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each row that a CPU has measured, and `ended`, in order of time."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in results.read("papers", cpu or results.cpu()):
        if json.loads(line["arguments"])["seed"] == seed:
            found[line["row"]][line["figure"]].append(float(line["value"]))
            if line["figure"] == "seconds":
                found[line["row"]]["ended"].append(datetime.fromisoformat(line["date"]).timestamp())
    return found


def folder_of(name: str) -> Path:
    """Return the folder with the traces of a row."""
    return Path("runs/papers", name.replace(" ", "_"))


def measure(name: str, seed: int) -> dict[str, Any]:
    """Run a row in a new process and return its figures; its folder keeps the traces."""
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    arguments = name, str(seed), str(folder)
    run_module("papers.child", *arguments, name=name, threads=ROWS[name].threads, kv_gib=2)
    return dict(json.loads((folder / "result.json").read_text()))


def simulate(rows: Mapping[str, Row], folder: Path) -> None:
    """Add the seconds of the rows by simulation, with the costs of the plain run and of a GPU."""
    traces = Traces(folder)
    newest = traces.newest(ROUNDS)
    about = DEFAULTS | about_of(traces)
    facts, work = beside(facts_of(about)), Workload.of_run(newest)
    costs = {"simulated": calibrated(newest), "h100": computed("h100", 1.5e9, 1, Costs())}
    of = {
        name: Setting(about, work, cost, Machine(about["slots"]), ROUNDS)
        for name, cost in costs.items()
    }
    for name, row in rows.items():
        schedule = make_schedule(row.callbacks(), facts)
        results.add(name, {cost: s.outcome(schedule).seconds for cost, s in of.items()})


def table_of_shape(shape: str, cpu: str) -> str:
    """Return Markdown: each schedule of a shape beside its simulation; empty without plain rounds.

    `times` is how many times as fast, by trained tokens, as the plain rounds that ran before.
    """
    found, rows = measured(0, cpu), list(SHAPES[shape])
    if not (plain := found[rows[0]])["seconds"]:
        return ""
    base = per_token(plain)
    kinds = [kind for kind in ("simulated", "h100") if kind in plain]
    titles = ("seconds", "times", *kinds, *FIGURES[1:])
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in (name for name in rows if found[name]["seconds"]):
        figures = found[name]
        ours = zip(figures["ended"], per_token(figures), strict=True)
        times = [base[max(0, bisect(plain["ended"], at) - 1)] / per for at, per in ours]
        cells = [cell(figures["seconds"]), results.with_error(times, 2)]
        cells += [f"{plain[k][-1] / figures[k][-1]:.2f}" if k in figures else "" for k in kinds]
        cells += [cell(figures.get(figure, [])) for figure in FIGURES[1:]]
        lines.append(f"| {name.removeprefix(f'{shape}, ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def per_token(figures: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the seconds of a trained token of each repeat."""
    return [*map(truediv, figures["seconds"], figures["trained_tokens"])]


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown row for each row, with means and standard errors of the repeats."""
    lines = [f"| | {' | '.join(FIGURES)} |", "|---" * (len(FIGURES) + 1) + "|"]
    for name in ROWS:
        if (figures := found[name])["seconds"]:
            cells = [cell(figures.get(figure, [])) for figure in FIGURES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """Return mean and standard error, or nothing if there are no values."""
    return results.with_error(values, 1 if fmean(values) < 1000 else 0) if values else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rows that are missing and print the table."""
    parser = results.parser("papers", __doc__)
    results.add_cases(parser, ROWS, "rows")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each row, in turn")
    parser.add_argument("--seed", type=int, default=0, help="order of the prompts, and noise")
    parser.add_argument("--again", action="store_true", help="also measure rows that are there")
    options = results.parse(parser, arguments, MODEL)
    wanted = [name for name in ROWS if name in options.rows]
    before = {} if options.again else measured(options.seed)
    for repeat in range(options.repeats):
        for name in wanted:
            if len(before.get(name, {}).get("seconds", ())) > repeat:
                continue
            print(f"{name}, repeat {repeat + 1} ...", file=sys.stderr, flush=True)
            figures = measure(name, options.seed)
            figures.pop("rounds")
            results.add(name, figures)
    for rows in SHAPES.values():
        plain = next(iter(rows))
        if len(before.get(plain, {}).get("seconds", ())) < options.repeats and plain in wanted:
            simulate(rows, folder_of(plain))
    print(table(measured(options.seed)))
