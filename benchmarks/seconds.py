"""Held-out accuracy over seconds on the chat model: TRL, plain GRPO and the schedules.

    make real-model
    python -m benchmarks run seconds --tasks short --seeds 0

`short` is the task of `configs/smollm2.yaml`. `long` asks for steps, in rounds of 8 completions:
few rows, where a CPU's step is flattest, as on a GPU. Weights are saved every few rounds, which the
clock sees, and evaluated after the run. `a core each`: the engine has a process and a thread of its
own, else engine and trainer take turns on two threads.

What `seconds.csv` has for this CPU is not measured again. `python -m benchmarks page` draws it.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.common import CHAT, Setting, run_module
from benchmarks.selection import Runs, cost, mean, with_jackknife

TARGET = 0.9
"""Share of plain GRPO's final accuracy."""
PICTURE = results.ROOT / "docs" / "images" / "seconds.png"
_MODEL, _DATA = CHAT["model"]["init_args"], CHAT["data"]
_SHORT = Setting(
    model=_MODEL["model"],
    task="arithmetic",
    learning_rate=_MODEL["learning_rate"],
    rounds=CHAT["trainer"]["max_epochs"],
    prompts=_DATA["prompts_per_round"],
    limit=_DATA["max_completion_length"],
    micro_batch_tokens=_DATA["micro_batch_tokens"],
    trl_backend="vllm",
    trl_batch_size=8,
    train_size=_DATA["train_data"]["init_args"]["size"],
    held_out=_DATA["val_data"]["init_args"]["size"],
    mask_truncated=_DATA["mask_truncated_completions"],
    threads=2,
    save_every=5,
)
TASKS = {
    "short": _SHORT,
    "long": replace(
        _SHORT, task="steps", rounds=24, prompts=2, generations=4, limit=512, save_every=8
    ),
}
APART: dict[str, Any] = {"threads": 1, "own_process": True}
"""A core each for engine and trainer."""


def _with(first: str, *others: str, **given: Any) -> dict[str, Any]:
    return {"callbacks": {first: given} | {name: {} for name in others}}


def rows(half: int) -> dict[str, dict[str, Any]]:
    """Return what differs from the setting of a task with groups of twice `half` completions."""
    return {
        "TRL": {},
        "plain": {},
        "plain, a core each": APART,
        "RolloutWindow()": APART | _with("RolloutWindow", "StreamedTraining"),
        "RolloutWindow(overtake=2)": APART | _with("RolloutWindow", "StreamedTraining", overtake=2),
        "SortedBatching(partial)": APART
        | _with("SortedBatching", "StreamedTraining", mode="partial"),
        "AsyncRollout()": APART | _with("AsyncRollout"),
        "DownSampling(half)": _with("DownSampling", keep=half),
        "PromptChoice()": _with("PromptChoice"),
        "DownSampling, PromptChoice": _with("DownSampling", "PromptChoice", keep=half),
        "AsyncRollout, DownSampling": APART | _with("DownSampling", "AsyncRollout", keep=half),
        "AsyncRollout, PromptChoice": APART | _with("AsyncRollout", "PromptChoice"),
        "AsyncRollout, DownSampling, PromptChoice": APART
        | _with("DownSampling", "AsyncRollout", "PromptChoice", keep=half),
    }


ROWS = {task: rows(setting.generations // 2) for task, setting in TASKS.items()}
SHOWN = ("TRL", "plain", "PromptChoice()", "AsyncRollout()", "DownSampling(half)")


def measure(row: str, setting: Setting) -> list[dict[str, float]]:
    """Train a row and evaluate what it saved: a point for the start and for each evaluation."""
    side = "theirs" if row == "TRL" else "ours"
    with tempfile.TemporaryDirectory(prefix="lit-rlsched-seconds-", dir="runs") as name:
        folder, judge = Path(name, "run"), Path(name, "judge")
        for module, where, threads in ((side, folder, setting.threads), ("evaluate", judge, 2)):
            where.mkdir()
            given = json.dumps(asdict(replace(setting, threads=threads))), str(where)
            run_module(module, *given, name=f"{row} ({module})", threads=threads)
        run, judged = (json.loads((f / "result.json").read_text()) for f in (folder, judge))
    results.check_rewards_differ(run["equal"], row)
    laps = [*zip(*run["laps"].values(), strict=True)]
    spent = {
        figure: [0.0, *accumulate(sum(part[of] for part in lap) for lap in laps)]
        for figure, of in (("seconds", "wall"), ("cpu_seconds", "cpu"))
    }
    spent["tokens"] = [0.0, *(lap["tokens"] for lap in run["laps"]["update"])]
    points = []
    for done in range(0, setting.rounds + 1, setting.save_every):
        accuracy = judged[str(done) if done else "start"]["val/accuracy"]
        at = {figure: values[done] for figure, values in spent.items()}
        points.append({"accuracy": accuracy, "rounds": float(done)} | at)
    points[-1]["peak_mib"] = run["peak_mib"]
    return points


def measured(task: str, cpu: str | None = None) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return what a CPU has measured: figures by row and seed, in the order of the rounds."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    for line in results.read("seconds", cpu or results.cpu(), task):
        _, row, seed = json.loads(line["row"])
        values = found.setdefault(row, {}).setdefault(seed, {}).setdefault(line["figure"], [])
        values.append(float(line["value"]))
    return found


def times(runs: Runs, row: str, target: float, base: str) -> float:
    """Return how many times as fast as another row it was."""
    return cost(runs, base, target, "seconds") / cost(runs, row, target, "seconds")


def complete(task: str, cpu: str | None = None, most: int | None = 3) -> Runs:
    """Return the rows that have all of the first seeds of plain GRPO, each with those runs."""
    rows = measured(task, cpu)
    seeds = sorted(rows.get("plain", {}))[:most]
    kept = [row for row in ROWS[task] if seeds and {*seeds} <= rows.get(row, {}).keys()]
    return {row: [rows[row][seed] for seed in seeds] for row in kept}


def tables(task: str, cpu: str | None = None) -> str:
    """Return a table of the first three seeds, and one of all seeds if plain GRPO has more."""
    runs = {len(of["plain"]): of for most in (3, None) if (of := complete(task, cpu, most))}
    return "\n\n".join(map(table, runs.values()))


def table(runs: Runs) -> str:
    """Return Markdown: what each row needs to the target."""
    target = TARGET * mean(runs["plain"], "accuracy")[-1]
    bases = [row for row in ("TRL", "plain", "plain, a core each") if row in runs]
    titles = ["last accuracy", "seconds", "CPU seconds", "tokens drawn"]
    titles += [*(f"times {base}" for base in bases), "ms a token", "peak memory, MiB"]
    lines = [
        f"Accuracy {target:.3f}, {TARGET:.0%} of plain GRPO's last; {len(runs['plain'])} seeds\n",
        f"| | {' | '.join(titles)} |",
        "|---" * (len(titles) + 1) + "|",
    ]
    for row in runs:
        of = partial(cost, name=row, target=target)
        cells = [results.with_error([run["accuracy"][-1] for run in runs[row]], 3)]
        spent = ("seconds", "cpu_seconds", "tokens")
        cells += [with_jackknife(partial(of, column=column), runs, 0) for column in spent]
        faster = partial(times, row=row, target=target)
        cells += [with_jackknife(partial(faster, base=base), runs) for base in bases]
        per = [1000 * run["seconds"][-1] / run["tokens"][-1] for run in runs[row]]
        cells.append(results.with_error(per, 1))
        cells.append(f"{max(run['peak_mib'][-1] for run in runs[row]):,.0f}")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(tasks: Mapping[str, Runs]) -> None:
    """Draw the accuracy over seconds, mean and each seed, a panel for each task with runs."""
    tasks = {task: runs for task, runs in tasks.items() if runs}
    figure = Figure(figsize=(4.6 * len(tasks), 3.2), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for panel, (task, runs) in zip(panels, tasks.items(), strict=True):
        for row in filter(runs.get, SHOWN):
            of, color = runs[row], f"C{SHOWN.index(row)}"
            for run in of:
                panel.plot(run["seconds"], run["accuracy"], color, alpha=0.25)
            panel.plot(mean(of, "seconds"), mean(of, "accuracy"), f"{color}.-", label=row)
        title = f"{TASKS[task].completions} completions of up to {TASKS[task].limit} tokens a round"
        panel.set(title=title, xlabel="seconds", ylabel="held-out accuracy", ylim=(0, 1))
        panel.legend(fontsize="small")
    figure.savefig(PICTURE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and print the tables of this CPU."""
    parser = results.parser("seconds", __doc__)
    results.add_cases(parser, TASKS, "tasks")
    results.add_cases(parser, ROWS["short"], "rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs")
    options = results.parse(parser, arguments, _SHORT.model)
    for seed, task, row in product(options.seeds, options.tasks, options.rows):
        if seed in measured(task).get(row, {}):
            continue
        print(f"{task}, {row}, seed {seed} ...", file=sys.stderr, flush=True)
        for point in measure(row, replace(TASKS[task], seed=seed, **ROWS[task][row])):
            results.add(json.dumps([task, row, seed]), point)
    for task in TASKS:
        if text := tables(task):
            print(f"{task} answers. {text}\n")
