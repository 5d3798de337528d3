"""The picture of the README: the same completions under four schedules, slot by slot.

    python -m benchmarks run picture

Deterministic and simulated: round rules and admission of a real run, on a virtual clock, with
log-normal lengths. Each completion has the same length under every schedule, and the longest first
knows the lengths beforehand.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import results
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.scheduling.trace import RolloutTrace
from lit_rlsched.simulation.loop import Visit, simulated_rounds, simulated_session
from lit_rlsched.types import Prompt, Sampling

SLOTS, UPDATE, UPDATES, LIMIT = 16, 32, 5, 1024
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
PANELS: tuple[tuple[str, Callable[[], RoundRule], bool], ...] = (
    ("Synchronous rounds, as plain vLLM runs them", lambda: FullRound(UPDATE), False),
    ("Longest first, lengths known (Infinite Sampling)", lambda: FullRound(UPDATE), True),
    ("TailBatching (RollPacker)", lambda: TailRound(UPDATE, 1), False),
    (
        'SortedBatching, mode="partial" (SortedRL)',
        lambda: SortedRound(UPDATE, UPDATE * UPDATES, 1, "completion", "partial"),
        False,
    ),
)
"""Title, rule, and whether the longest completions start first."""


def decode(rule: RoundRule, longest_first: bool, lengths: Sequence[int]) -> list[RolloutTrace]:
    """Return the trace of each round until every completion is trained on."""
    recorded = {f"{number}/0": length for number, length in enumerate(lengths)}
    session = simulated_session(
        SimulatedEngine(lengths=recorded, length_only=True, stream=False),
        SLOTS,
        LIMIT + 1,
        lambda: Admission(SLOTS, order="longest_first" if longest_first else "fifo"),
        CalibratedPredictor(Oracle(recorded)) if longest_first else None,
    )
    visits = (Visit(Prompt(str(p), "", (1,)), str(p)) for p in range(len(lengths)))
    rounds = simulated_rounds(session, visits, Sampling(LIMIT), 1, lambda number: rule)
    return [drawn.trace for drawn in rounds]


def draw(axes: Axes, title: str, traces: Sequence[RolloutTrace]) -> dict[str, float]:
    """Draw the rounds one after the other and return the figures of the title."""
    steps = sum(trace.decode_steps for trace in traces)
    idle = 1 - sum(trace.busy_slot_steps for trace in traces) / (SLOTS * steps)
    starts = accumulate((trace.decode_steps for trace in traces), initial=0)
    for trace, start, colour in zip(traces, starts, cycle(COLOURS), strict=False):
        columns = (trace.spans[name] for name in ("slot", "start_step", "end_step"))
        for slot, begin, end in zip(*columns, strict=True):
            axes.broken_barh(
                [(start + begin, end - begin)],
                (slot + 0.05, 0.9),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.4,
            )
        axes.axvline(start + trace.decode_steps, color="black", linewidth=1)
    axes.set_title(f"{title}: {steps:,} decode steps, {idle:.0%} idle", loc="left", fontsize=10)
    axes.set_ylabel(f"{SLOTS} slots")
    axes.set(yticks=[], ylim=(0, SLOTS))
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return {"decode_steps": steps, "idle": idle}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture."""
    parser = results.parser("picture", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--out", default="docs/images/schedules.png", help="file to write")
    options = results.parse(parser, arguments)
    drawn = np.random.default_rng(options.seed).lognormal(np.log(150), 1.0, UPDATE * UPDATES)
    lengths = np.ceil(drawn).clip(max=LIMIT).astype(int).tolist()
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (title, rule, longest_first) in zip(
        figure.subplots(len(PANELS), sharex=True), PANELS, strict=True
    ):
        results.add(title, draw(axes, title, decode(rule(), longest_first, lengths)))
    axes.set_xlabel(
        f"decode steps (simulated) until {len(lengths)} completions are trained on; "
        "a line is an update, a colour a round, white is idle"
    )
    figure.savefig(options.out, dpi=110)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
