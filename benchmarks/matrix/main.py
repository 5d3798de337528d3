"""Which callbacks go together, and what they buy: simulated, and the best on a real chat model.

    make real-model
    python -m benchmarks run matrix

A plain run of `configs/smollm2.yaml` (sums of one digit, a chat model of 135 M parameters on real
vLLM, its own lengths) gives lengths and costs. On these every callback, every pair and every triple
that go together are simulated. Those in which each callback pays are sorted by seconds; the ten
most useful, half of them on-policy and unbiased, are then run as the plain one was, with the
configuration that `lit-rlsched simulate` recommends for them. Engine and trainer have a process and
a core each. How much they slow each other down is taken from the run of
`AheadRollout(correction="importance")`, because a plain run does not show it. The held-out accuracy
of one run of few rounds has a standard error of 0.04 to 0.08.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.common import ENVIRONMENT
from benchmarks.matrix.twin import LAST, twin
from benchmarks.papers.rows import MODEL
from lit_rlsched.callbacks.candidates import PLAIN, breaks, wanted_of, written
from lit_rlsched.callbacks.pictures.style import BLUE, GREEN, GREY, figure_of
from lit_rlsched.callbacks.what_if import Simulated, about_of, plain_of, setting_of, what_if
from lit_rlsched.cli.simulate import facts_of
from lit_rlsched.run.record import read_run
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import calibrated

PAYS = 0.98
"""A combination is useful if it takes at most this share of the seconds of its parts."""
BESIDE = "AheadRollout(correction='importance')"
"""Its run shows how much engine and trainer slow each other down."""
EXACT = ("on_policy", "unbiased")


def useful(rows: Sequence[Simulated], number: int) -> list[Simulated]:
    """Return the fastest combinations in which each callback pays, half of them exact.

    Args:
        rows: Simulations of combinations and of their parts.
        number: How many to return.
    """
    seconds = {options_of(row): row.outcome.seconds for row in rows}
    paying = []
    for row in rows:
        own = options_of(row)
        parts = (seconds[part] for part in combinations(own, len(own) - 1)) if own else ()
        orders = "MicroGroupSampling" in row.name  # every completion has a slot here
        if own and not orders and all(row.outcome.seconds <= PAYS * part for part in parts):
            paying.append(row)
    paying.sort(key=lambda row: row.outcome.seconds)
    exact = [row for row in paying if not breaks(row.schedule, row.outcome, wanted_of(EXACT))]
    chosen = exact[: number // 2]
    chosen += [row for row in paying if row not in chosen][: number - len(chosen)]
    return sorted(chosen, key=lambda row: row.outcome.seconds)


def options_of(row: Simulated) -> tuple[str, ...]:
    """Return the callbacks of a combination as they are written in Python."""
    return tuple(map(written, row.of.options)) if row.of else ()


def folder_of(row: Simulated) -> str:
    """Return the name of a combination's folder."""
    return "+".join(options_of(row)).translate(str.maketrans("'=(),", "_____", " "))


def run(
    overlay: str, folder: Path, rounds: int, prompts: int, seed: int, generations: int = 8
) -> None:
    """Train the chat model.

    Args:
        overlay: Configuration of the schedule; empty: no callback.
        folder: Of the run; it gets a file `complete` at the end.
        rounds: Number of rounds.
        prompts: Prompts of each.
        seed: Of everything.
        generations: Completions of a prompt.
    """
    file = folder.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(overlay, encoding="utf-8")
    command = [sys.executable, "-m", "lit_rlsched", "fit", "-c", "configs/smollm2.yaml"]
    if overlay:
        command += ["-c", str(file)]
    given = {
        "seed_everything": seed,
        "data.engine": "ProcessEngine",
        "data.engine.engine": "VLLMEngine",
        "data.prompts_per_round": prompts,
        "data.num_generations": generations,
        "trainer.max_epochs": rounds,
        "trainer.check_val_every_n_epoch": rounds,
        "trainer.num_sanity_val_steps": 0,
        "trainer.default_root_dir": folder,
    }
    command += [f"--{name}={value}" for name, value in given.items()]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, cwd=results.ROOT)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # gigabytes
    (folder / "complete").touch()


def measured(folder: Path) -> dict[str, float]:
    """Return what a run has measured from the end of its first rollout to that of the last one.

    Seconds and slot-steps are those for each update's worth of prompts: a round of
    `SortedBatching` trains on more.
    """
    traces = Traces(folder)
    rounds = traces.rows("rounds")
    groups = {
        (row["round"], row["request"].rpartition("/")[0])
        for row in traces.rows("completions")
        if row["round"] > rounds[0]["round"]
    }
    updates = len(groups) / traces.about["prompts_per_round"]
    metrics = [dict(row["metrics"]) for row in rounds]
    validations = [row for row in read_run(folder) if "val/mean@4" in row]
    return {
        "seconds": (rounds[-1]["clock"] - rounds[0]["clock"]) / updates,
        "slot_steps": sum(of["rollout/slot_steps"] for of in metrics[1:]) / updates,
        "idle_share": fmean(of["rollout/bubble_ratio"] for of in metrics[1:]),
        "length_bias": metrics[-1].get("pool/trained_over_drawn_length", 1.0),
        "staleness": fmean(of.get("staleness/mean", 0.0) for of in metrics[1:]),
        "accuracy": validations[-1]["val/mean@4"],
        "greedy": validations[-1]["val/greedy_accuracy"],
    }


def grid(rows: Sequence[Simulated], plain: float) -> tuple[list[str], np.ndarray]:
    """Return how many times as fast each pair is, by its two callbacks; alone on the diagonal."""
    names = [name for row in rows if len(options_of(row)) == 1 for name in options_of(row)]
    fast = np.full((len(names), len(names)), np.nan)
    for row in rows:
        places = [names.index(name) for name in options_of(row) if name in names]
        if 0 < len(options_of(row)) == len(places) < 3:
            fast[places[0], places[-1]] = fast[places[-1], places[0]] = plain / row.outcome.seconds
    return names, fast


def picture(
    rows: Sequence[Simulated], real: Mapping[str, Mapping[str, float]], plain: float
) -> Figure:
    """Draw the pairs that go together, and the real runs beside their simulations."""
    names, fast = grid(rows, plain)
    seconds = {row.name: row.outcome.seconds for row in rows}
    with figure_of(19.0, 8.5) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        left.grid(False)
        image = left.imshow(fast, cmap="cividis")
        figure.colorbar(image, ax=left, shrink=0.7, label="times as fast as without a callback")
        left.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        left.set_yticks(range(len(names)), names, fontsize=8)
        middle = np.nanmean([np.nanmin(fast), np.nanmax(fast)])
        for (i, j), value in np.ndenumerate(fast):
            if np.isfinite(value):
                colour = "white" if value < middle else "black"
                left.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, size=7)
        left.set_title("Simulated pairs; alone on the diagonal; blank: they do not go together")
        shown = [*real][::-1]
        places = np.arange(len(shown))
        right.barh(places + 0.2, [seconds[n] for n in shown], 0.38, color=GREY, label="simulated")
        values = [real[n]["seconds"] for n in shown]
        right.barh(places - 0.2, values, 0.38, color=BLUE, label="measured")
        for place, name, value in zip(places, shown, values, strict=True):
            of = real[name]
            text = f" accuracy {of['accuracy']:.2f}, length {of['length_bias']:.2f}"
            right.text(value, place - 0.2, text, va="center", size=8, color=GREEN)
        right.set_yticks(places, shown, fontsize=8)
        right.set(xlabel="seconds of a round", xlim=(0, 1.7 * max([*values, plain])))
        right.grid(axis="y", visible=False)
        right.legend(loc="lower right")
        right.set_title("Real runs of a chat model on two cores")
    return figure


def table(real: Mapping[str, Mapping[str, float]], seconds: Mapping[str, float]) -> str:
    """Return the real runs as Markdown."""
    lines = [
        "| callbacks | seconds, simulated | measured | times as fast | slot-steps | idle | "
        "trained / drawn length | staleness | accuracy (greedy) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, of in real.items():
        lines.append(
            f"| {name} | {seconds[name]:.1f} | {of['seconds']:.1f} | "
            f"{real[PLAIN]['seconds'] / of['seconds']:.2f} | {of['slot_steps']:,.0f} | "
            f"{of['idle_share']:.0%} | {of['length_bias']:.2f} | {of['staleness']:.2f} | "
            f"{of['accuracy']:.2f} ({of['greedy']:.2f}) |"
        )
    return "\n".join(lines)


def fastest(rows: Iterable[Simulated], size: int, plain: float, number: int = 10) -> str:
    """Return the fastest combinations of a size as text."""
    of_size = [row for row in rows if len(options_of(row)) == size]
    of_size.sort(key=lambda row: row.outcome.seconds)
    shown = (f"{plain / row.outcome.seconds:5.2f}  {row.name}" for row in of_size[:number])
    return "\n".join([f"{len(of_size)} of {size} callbacks; times as fast:", *shown])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, simulate, run the most useful, and print and draw both."""
    parser = results.parser("matrix", __doc__)
    parser.add_argument("--real", type=int, default=10, help="combinations that are really run")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each real run")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each of its rounds")
    parser.add_argument("--most", type=int, default=3, help="callbacks of a combination")
    parser.add_argument("--simulated-rounds", type=int, default=12, help="after the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of each real run")
    parser.add_argument("--runs", default="runs/matrix", help="folder; its complete runs are used")
    parser.add_argument(
        "--picture", default="docs/images/combinations.png", help="file of the picture"
    )
    parser.add_argument(
        "--twin", default="docs/images/twin.png", help="file of two runs and their simulations"
    )
    options = results.parse(parser, arguments)
    if not Path(MODEL).is_dir():
        parser.error(f"no model in {MODEL}: run `make real-model`")
    if options.rounds <= LAST:
        parser.error(f"--rounds {options.rounds}: use {LAST + 1} or more")
    runs = Path(options.runs).absolute()

    def done(row: Simulated | None, name: str) -> Path:
        folder = runs / name
        if not (folder / "complete").exists():
            overlay = row.of.overlay("VLLMEngine") if row is not None and row.of else ""
            run(overlay, folder, options.rounds, options.prompts, options.seed)
        return folder

    plain_run = done(None, "plain")
    traces = Traces(plain_run)
    facts = facts_of(about_of(traces))
    beside = next(row for row in what_if(traces, facts) if row.name == BESIDE)
    slowdown = calibrated(Traces(done(beside, folder_of(beside)))).slowdown
    print(f"engine and trainer take {slowdown or 1:.2f} times as long while both work\n")
    rows = what_if(traces, facts, options.most, options.simulated_rounds, slowdown)
    plain = plain_of(rows)
    assert plain is not None
    real: dict[str, dict[str, Any]] = {PLAIN: measured(plain_run)}
    for row in useful(rows, options.real):
        real[row.name] = measured(done(row, folder_of(row)))
    seconds = {row.name: row.outcome.seconds for row in rows}
    for row_name, figures in real.items():
        results.add(row_name, {**figures, "simulated": seconds[row_name]})
    for size in range(1, options.most + 1):
        print(fastest(rows, size, plain.seconds), end="\n\n")
    print(table(real, seconds))
    picture(rows, real, plain.seconds).savefig(options.picture)
    setting = setting_of(traces, options.simulated_rounds, slowdown)
    assert setting is not None
    titled = (("No callback", PLAIN), ("AheadRollout on tokens one round old", BESIDE))
    pairs = [
        (title, row, done(row, folder_of(row) or "plain"))
        for title, name in titled
        for row in rows
        if row.name == name
    ]
    twin(setting, pairs).savefig(options.twin)


if __name__ == "__main__":
    main()
