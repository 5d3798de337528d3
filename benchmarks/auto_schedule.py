"""`AutoSchedule` against each of its candidates, on lengths that it has not seen. Simulated.

    python -m benchmarks run auto_schedule

Each case is a run of 60 rounds, whose lengths may change on the way: `steady` (log-normal),
`narrow` (nearly equal), `longer` (the median grows eightfold), `tail` (the tail grows), `shorter`,
and `recorded` (those of a chat model). With few and with many slots, and with updates that take
nothing or most of a round. The callback decides from the lengths of the prompts of its last 8
rounds; costs are known. The goal for `worst` is 1.05.

    make real-model
    python -m benchmarks run auto_schedule --real 3

Real runs of the chat model in place of these, with and without the callback: 12 rounds of 64
completions on 16 slots, as in the benchmark `fidelity`. Seconds are those of a round, without the
first two.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks import results
from benchmarks.fidelity.main import measure
from benchmarks.fidelity.rows import AUTO
from benchmarks.papers.rows import LENGTHS
from lit_rlsched.callbacks import AutoSchedule
from lit_rlsched.callbacks.candidates import rule_options, written
from lit_rlsched.cli.simulate import facts_of
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import Costs
from lit_rlsched.simulation.pipeline import Machine, Pipeline
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.training.schedule import Schedule

PROMPTS, GENERATIONS, LIMIT, ROUNDS, RECENT = 16, 8, 4096, 60, 8


def lengths_of(case: str, seed: int) -> list[list[int]]:
    """Return the lengths of more prompts than a run draws."""
    chance = np.random.default_rng(seed)
    number = 4 * ROUNDS * PROMPTS
    if case == "recorded":
        with LENGTHS.open() as file:
            rows = [[int(n) for n in of[:GENERATIONS]] for _, *of in csv.reader(file)]
        return [rows[i] for i in chance.integers(len(rows), size=number)]
    at = np.minimum(np.arange(number) / (ROUNDS * PROMPTS), 1)[:, None]
    grows, one = 8.0**at, np.ones_like(at)
    median = {"longer": 100 * grows, "shorter": 800 / grows}.get(case, 400 * one)
    sigma = {"narrow": 0.1 * one, "tail": 0.3 + 1.2 * at}.get(case, one)
    noise = math.sqrt(0.5) * (chance.normal(size=(number, 1)) + chance.normal(size=(number, 8)))
    return np.ceil(median * np.exp(sigma * noise)).clip(1, LIMIT).astype(int).tolist()


def seconds(pipeline: Pipeline, before: Callable[[int], None] = lambda n: None) -> float:
    """Return the seconds for each prompt that a run trains on."""
    rounds = []
    for number in range(ROUNDS):
        before(number)
        rounds.append(pipeline.next_round(number))
    return sum(each.seconds for each in rounds) / sum(each.prompts for each in rounds)


def run(
    work: Workload, costs: Costs, machine: Machine, constraints: Sequence[str]
) -> tuple[float, dict[str, float], list[str]]:
    """Run the callback and each of its candidates.

    Returns:
        Seconds of a prompt with the callback, those with each candidate, and what it has chosen.
    """
    sizes = {"prompts_per_round": PROMPTS, "num_generations": GENERATIONS}
    facts = facts_of({**sizes, "max_completion_length": LIMIT})
    auto, schedule = AutoSchedule(constraints), Schedule(FullRound(PROMPTS))
    auto.apply(schedule, facts)
    chosen = [auto.candidates[0].name]
    pipeline = Pipeline(schedule, work, costs, machine, GENERATIONS)

    def decide(number: int) -> None:
        if number and auto.decides(number):
            first = max(0, number - RECENT) * PROMPTS
            recent = replace(
                work,
                lengths=work.lengths[first : number * PROMPTS],
                prompt_tokens=work.prompt_tokens[first : number * PROMPTS],
            )
            outcomes = auto.outcomes(recent.shuffled(number), costs, machine, GENERATIONS)
            auto.decide(outcomes, number)
            if (name := auto.candidates[auto.chosen].name) != chosen[-1]:
                chosen.append(name)
            auto.switch()

    ours, fixed = seconds(pipeline, decide), {}
    for each in auto.candidates.values():
        fixed[each.name] = seconds(Pipeline(each.schedule, work, costs, machine, GENERATIONS))
    return ours, fixed, chosen


def real(seeds: int, runs: Path) -> None:
    """Print a row for each pair of real runs; those that are there are used."""
    print(
        "| seed | no callback | AutoSchedule | before the switch | after it | gain foreseen | to |"
    )
    print("|---|---|---|---|---|---|---|")
    for seed in range(seeds):
        laps, figures = {}, list[dict[str, float]]()
        for name in AUTO:
            folder = runs / f"{name}-{seed}"
            if not (folder / "complete").exists():
                measure(name, seed, folder)
                (folder / "complete").touch()
            rounds = Traces(folder).rows("rounds")
            laps[name] = np.diff([row["clock"] for row in rounds])[1:]  # from the third round on
            figures = [dict(row["metrics"]) for row in rounds]
        plain, ours = laps.values()
        chosen = [int(of["auto_schedule/next"]) for of in figures]
        at = next((i for i, number in enumerate(chosen) if number), len(chosen))
        foreseen = figures[at].get("auto_schedule/gain", 0.0) if at < len(chosen) else 0.0
        before, after = ours[: max(0, at - 1)], ours[max(0, at - 1) :]
        to = " + ".join(map(written, rule_options()[chosen[-1]])) or "none"
        means = [float(np.mean(of)) if len(of) else math.nan for of in (plain, ours, before, after)]
        results.add(f"real, seed {seed}", {"over_plain": means[1] / means[0]})
        shown = " | ".join(f"{mean:.1f}" for mean in means)
        print(f"| {seed} | {shown} | {foreseen:.0%} | {to} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each case."""
    parser = results.parser("auto_schedule", __doc__)
    cases = ("steady", "narrow", "longer", "shorter", "tail", "recorded")
    results.add_cases(parser, cases)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--real", type=int, default=0, help="pairs of real runs, in place of cases")
    parser.add_argument("--runs", default="runs/auto_schedule", help="folder of the real runs")
    options = results.parse(parser, arguments)
    if options.real:
        real(options.real, Path(options.runs))
        return
    print("| case | slots | update | over the best | over the plain one | chosen (seed 0) |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for case, slots, (name, position) in product(
        options.cases, (32, 128), (("free", 0.0), ("usual", 2e-4))
    ):
        ratios, gains, first = [], [], list[str]()
        for seed in range(options.seeds):
            lengths = lengths_of(case, seed)
            work = Workload(lengths, [128] * len(lengths), LIMIT)
            costs = replace(Costs(), position=position, verify=position / 3, update=0.0)
            ours, fixed, chosen = run(work, costs, Machine(slots), ("on_policy",))
            ratios.append(ours / min(fixed.values()))
            gains.append(ours / fixed["no callback"])
            first = first or chosen
        worst = max(worst, *ratios)
        row = f"{case}, {slots} slots, update {name}"
        results.add(row, {"over_best": fmean(ratios), "over_plain": fmean(gains)})
        print(
            f"| {case} | {slots} | {name} | {fmean(ratios):.3f} | {fmean(gains):.3f} | "
            f"{' → '.join(first)} |",
            flush=True,
        )
    print(f"\nworst: {worst:.3f}")


if __name__ == "__main__":
    main()
