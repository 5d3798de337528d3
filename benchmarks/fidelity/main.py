"""How well simulated seconds are those of real runs of a chat model, on real vLLM.

    make real-model
    python -m benchmarks run fidelity

Each row is a run of three rounds, of completions that have the lengths of `papers/lengths.csv`,
divided by 16; engines and trainer have a process and a core each. Rows of 64 completions a round
have nothing to update; their costs are fitted to the run `16 slots` alone. Those of 16 completions
train, with costs of the run `4 slots, updates`. From them and the lengths every run is simulated.
Decode steps, slot-steps and idle slot-steps must be equal in each round. Seconds are those from the
end of the second rollout (the first rollout and the first update warm up) to the end of the last.
`spread` is half the range of the repeats, relative to their mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import results
from benchmarks.common import run_module
from benchmarks.fidelity.rows import LIMIT, ROWS, SCALE, UPDATES
from benchmarks.papers.rows import MODEL, recorded_lengths
from lit_rlsched.cli.simulate import facts_of
from lit_rlsched.data.source import DomainSource
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import Costs, calibrated
from lit_rlsched.simulation.pipeline import Machine, Pipeline, SimulatedRound
from lit_rlsched.simulation.workload import Workload
from lit_rlsched.types import LengthOnly, Prompt

COUNTS = ("decode_steps", "slot_steps", "idle_slot_steps")


def measure(name: str, seed: int, folder: Path) -> None:
    """Run a row in a new process; the folder gets its traces."""
    run_module("fidelity.child", name, str(seed), str(folder), name=name, kv_gib=2)


def workload_of(recorded: Mapping[str, Sequence[int]], tokens: Mapping[str, int]) -> Workload:
    """Return the lengths of all prompts, in the order of the file.

    Args:
        recorded: Lengths of each prompt's completions, by uid.
        tokens: Tokens of each prompt, by uid, as far as a run has drawn them.
    """
    usual = round(fmean(tokens.values()))
    lengths = [[-(-n // SCALE) for n in of] for of in recorded.values()]
    return Workload(lengths, [tokens.get(uid, usual) for uid in recorded], LIMIT)


def simulated(
    name: str, seed: int, costs: Costs, work: Workload, places: Sequence[int]
) -> list[SimulatedRound]:
    """Simulate a row.

    Args:
        name: The row.
        seed: Seed of the order of prompts.
        costs: Costs of the calibration.
        work: Lengths of all prompts.
        places: Place in `work` of each prompt of the data set.
    """
    row = ROWS[name]
    sizes = {
        "prompts_per_round": row.prompts,
        "num_generations": row.generations,
        "max_completion_length": LIMIT,
    }
    facts = facts_of(sizes)
    schedule = make_schedule(row.callbacks(), facts)
    prompts = [
        Prompt(str(place), "", LengthOnly(work.prompt_tokens[place]))  # type: ignore[arg-type]
        for place in places
    ]
    machine = Machine(row.slots, row.engines, accepted=1.0)
    pipeline = Pipeline(
        schedule,
        work,
        costs,
        machine,
        row.generations,
        source=DomainSource(prompts, seed, True, None),
    )
    return pipeline.run(row.rounds).rounds


def measured(traces: Traces) -> tuple[list[dict[str, float]], float, float]:
    """Return the metrics of each round, seconds, and seconds of decode steps.

    Seconds are those from the end of the second rollout to the end of the last one.
    """
    rounds = [dict(row["metrics"]) for row in traces.rows("rounds")]
    laps = [row for row in traces.rows("intervals") if row["lane"] == "trainer"]
    seconds = sum(r["end"] - r["start"] for r in laps if 2 < r["round"] <= len(rounds))
    return rounds, seconds, sum(metrics["rollout/seconds"] for metrics in rounds[2:])


def predicted_seconds(rounds: Sequence[SimulatedRound], name: str) -> float:
    """Return the seconds of the same laps: an update, and the rollout after it or beside it."""
    pairs = [*pairwise(rounds)][1:]
    if name == "AsyncRollout":
        return sum(before.seconds for before, _ in pairs)
    return sum(before.update + after.around + after.rollout for before, after in pairs)


def compared(name: str, seed: int, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return figures of a row: predicted, measured, and whether the counts are equal."""
    calibration = Traces(folders[ROWS[name].calibration])
    costs = calibrated(calibration)
    trained = calibrated(Traces(folders[UPDATES]))  # the others train on nothing
    costs = replace(costs, verify=trained.verify)
    tokens = {row["uid"]: row["prompt_tokens"] for row in calibration.rows("completions")}
    recorded = recorded_lengths()
    places = dataset_order([*recorded])
    rounds = simulated(name, seed, costs, workload_of(recorded, tokens), places)
    metrics, seconds, decoding = measured(Traces(folders[name]))
    equal = [
        all(getattr(ours, count) == of[f"rollout/{count}"] for count in COUNTS)
        for ours, of in zip(rounds, metrics, strict=True)
    ]
    predicted = predicted_seconds(rounds, name)
    steps = sum(each.decoding for each in rounds[2:])
    return {
        "predicted": predicted,
        "measured": seconds,
        "error": predicted / seconds - 1,
        "predicted_decoding": steps,
        "decoding": decoding,
        "decoding_error": steps / decoding - 1,
        "equal_rounds": sum(equal),
    }


def dataset_order(uids: Sequence[str]) -> list[int]:
    """Return the place in the file of lengths of each row of the data set."""
    from benchmarks.papers.child import PROMPTS as ALL
    from benchmarks.papers.child import TASK
    from lit_rlsched.data.tasks import ReasoningGym

    return [uids.index(row["uid"]) for row in ReasoningGym(TASK, "train", ALL).rows()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate and compare the rows."""
    parser = results.parser("fidelity", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each row, in turn")
    parser.add_argument("--seed", type=int, default=0, help="order of the prompts, and noise")
    parser.add_argument(
        "--runs", default="runs/fidelity", help="folder of the runs; those that are there are used"
    )
    options = results.parse(parser, arguments)
    if not Path(MODEL).is_dir():
        parser.error(f"no model in {MODEL}: run `make real-model`")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for repeat in range(options.repeats):
        folders = {name: Path(options.runs) / f"{name}-{repeat}" for name in ROWS}
        for name, folder in folders.items():
            if not (folder / "complete").exists():
                measure(name, options.seed, folder)
                (folder / "complete").touch()
        for name in ROWS:
            figures = compared(name, options.seed, folders)
            results.add(name, figures)
            found[name].append(figures)
    print(table(found))


def spread(values: Sequence[float]) -> float:
    """Return half the range of the values, relative to their mean."""
    return (max(values) - min(values)) / 2 / fmean(values)


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return a Markdown row for each row, and the median error of those that are predicted."""
    lines = [
        "| | seconds, simulated | measured | error | spread | decoding alone | equal rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for name, of in found.items():
        mean = {figure: fmean(each[figure] for each in of) for figure in of[0]}
        lines.append(
            f"| {name} | {mean['predicted']:.1f} | {mean['measured']:.1f} | "
            f"{100 * mean['error']:+.1f} % | {100 * spread([e['measured'] for e in of]):.1f} % | "
            f"{100 * mean['decoding_error']:+.1f} % | "
            f"{mean['equal_rounds']:.0f} of {ROWS[name].rounds} |"
        )
        if name != ROWS[name].calibration:
            errors.append(abs(mean["error"]))
    return "\n".join([*lines, "", f"median error of a prediction: {100 * median(errors):.1f} %"])


if __name__ == "__main__":
    main()
