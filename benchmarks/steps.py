"""Decode steps of each schedule on the same completions, and the smallest possible number.

    python -m benchmarks run steps

Deterministic: completions of the quick task are recorded once, which takes some minutes, and
replayed on a virtual clock, with their own lengths and with published length distributions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks import results
from benchmarks.record import read_recording, record
from benchmarks.replay import Replayed, Schedule, least_steps, replay
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.types import Completion, Group, Sampling

Rounds = Sequence[Sequence[Group]]


@dataclass(frozen=True)
class Shape:
    """A published length distribution: log-normal, cut at a limit.

    The lengths are assigned to the completions of the quick task by rank: the longest of a recorded
    round becomes the longest here. So prompts and first tokens predict lengths as well as in the
    recording.
    """

    name: str
    median: float
    sigma: float
    limit: int
    completions: int
    """Completions per round."""
    slots: tuple[int, ...]

    def stretch(self, recorded: Rounds) -> list[list[Group]]:
        """Return the recorded completions with lengths of this distribution, in new rounds."""
        groups = [group for rounds in recorded for group in self._stretched(rounds)]
        size = self.completions // len(groups[0].completions)
        return [groups[i : i + size] for i in range(0, len(groups) - size + 1, size)]

    def _stretched(self, recorded: Sequence[Group]) -> list[Group]:
        lengths = np.array([len(c.token_ids) for g in recorded for c in g.completions])
        ranks = np.random.default_rng(0).permutation(len(lengths))  # breaks ties
        ranks = ranks[np.argsort(lengths[ranks], kind="stable")]
        at = {int(row): rank for rank, row in enumerate(ranks)}
        groups, row = [], 0
        for group in recorded:
            completions = []
            for completion in group.completions:
                z = NormalDist().inv_cdf((at[row] + 0.5) / len(lengths))
                length = round(min(self.limit, max(1, self.median * math.exp(self.sigma * z))))
                more = max(0, length - len(completion.token_ids))
                token_ids = (completion.token_ids + completion.token_ids[-1:] * more)[:length]
                completions.append(Completion(completion.index, token_ids))
                row += 1
            groups.append(Group(group.id, group.prompt, Sampling(self.limit), completions))
        return groups


SHAPES = [
    # arXiv 2506.22950: 32 completions of at most 1,024 tokens. Median and spread follow from its
    # 3,250 steps in micro groups of 8 and 1,770 steps with continuous refilling
    Shape("Infinite Sampling: 32 completions, <= 1k", 340, 1.0, 1024, 32, (4, 8)),
    # arXiv 2603.23414: 512 completions, 80 % within 3k tokens, 5 % at the limit of 8k
    Shape("SortedRL: 512 completions, <= 8k", 1200, 1.1, 8192, 512, (32, 64)),
    # arXiv 2509.21009: 128 prompts x 8, the longest 25 to 32 times the median
    Shape("RollPacker: 1,024 completions, <= 16k", 550, 1.1, 16384, 1024, (32, 64)),
]

SCHEDULES = [
    Schedule("naive rounds (micro groups)", refill="rounds"),
    Schedule("sorted rounds, lengths known", "rounds", "longest_first", Oracle),
    Schedule("continuous, fifo"),
    Schedule("continuous, shortest first, lengths known", "continuous", "shortest_first", Oracle),
    Schedule("continuous, longest first, lengths known", "continuous", "longest_first", Oracle),
    Schedule("continuous, planned, lengths known", "continuous", "planned", Oracle),
]


def learned(order: str, probe_tokens: int) -> Schedule:
    """Return a schedule that learns the lengths while it runs."""
    return Schedule(
        f"continuous, {order.replace('_', ' ')}, lengths learned"
        + (f", {probe_tokens}-token probe" if probe_tokens else ""),
        "continuous",
        order,  # type: ignore[arg-type]
        lambda lengths: TokenConditioned(),
        probe_tokens,
    )


def table(name: str, rounds: Rounds, slots: int, probe_tokens: Sequence[int]) -> str:
    """Return one workload with each schedule as Markdown."""
    least = least_steps(rounds, slots)
    lengths = [len(c.token_ids) for groups in rounds for g in groups for c in g.completions]
    p50, p90 = np.percentile(lengths, [50, 90])
    lines = [
        f"{name}; {len(rounds)} rounds, {len(lengths) // len(rounds)} completions each, "
        f"{slots} slots; median {p50:.0f}, p90 {p90:.0f}, longest {max(lengths)} tokens",
        "",
        "| schedule | decode steps | over the lower bound | fewer than naive rounds | |",
        "|---|---|---|---|---|",
    ]
    naive = None
    orders = ("longest_first", "planned")
    schedules = [*SCHEDULES, *(learned(o, k) for k in probe_tokens for o in orders)]
    for schedule in schedules:
        replayed = replay(rounds, schedule, slots)
        naive = naive or replayed.decode_steps
        figures: dict[str, float] = {"decode_steps": replayed.decode_steps, "lower_bound": least}
        lines.append(
            f"| {schedule.name} | {replayed.decode_steps:,} | "
            f"+{replayed.decode_steps / least - 1:.1%} | {1 - replayed.decode_steps / naive:.1%} |"
        )
        if schedule.order == "longest_first" and schedule.predictor is not Oracle:
            figures["rank_correlation"] = rank_correlation(replayed)
            lines[-1] += f" rank correlation {figures['rank_correlation']:.2f} |"
        results.add(f"{name}, {slots} slots: {schedule.name}", figures)
    return "\n".join([*lines, f"| lower bound | {least:,} | | {1 - least / (naive or 1):.1%} | |"])


def rank_correlation(replayed: Replayed) -> float:
    """Return the mean rank correlation of the second half of the rounds."""
    values = [m["length_prediction/rank_correlation"] for m in replayed.metrics]
    return float(np.mean(values[len(values) // 2 :]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("steps", __doc__)
    parser.add_argument(
        "--recording", default="runs/recording", help="recording of the quick task; made if missing"
    )
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[16, 32], help="number of slots for the quick task"
    )
    parser.add_argument(
        "--probe-tokens",
        type=int,
        nargs="+",
        default=[0, 16],
        help="tokens that are drawn before lengths are predicted",
    )
    options = results.parse(parser, arguments)
    if not Path(options.recording).exists():
        record(options.recording)
    quick = read_recording(options.recording)
    workloads = [("Quick task", quick, options.slots)]
    workloads += [(shape.name, shape.stretch(quick), shape.slots) for shape in SHAPES]
    for name, rounds, choices in workloads:
        for slots in choices:
            print(table(name, rounds, slots, options.probe_tokens), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
