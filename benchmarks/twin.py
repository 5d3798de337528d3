"""Schedules where a decode step costs the same with few rows and with many, as on a GPU.

    python -m benchmarks run twin

All is simulated, and the costs are those that `lit-rlsched simulate --gpu h100` computes. Lengths
are log-normal. On shared devices engine and trainer take turns, and no gradients are streamed.

`--accepted` is the share of drafts that a policy one round younger accepts whole, perhaps followed
by those of policies two, three, ... rounds younger; of older drafts as much per round. The new
policy reads each draft; those that it cuts are read once more by each policy that drew them.

`x` is times as fast as plain rounds, by completions; `length` is trained over drawn.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import results
from benchmarks.papers.rows import callbacks
from lit_rlsched.callbacks.what_if import WARM_UP, Setting, beside
from lit_rlsched.cli.simulate import DEFAULTS, facts_of
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.simulation.costs import Costs, computed
from lit_rlsched.simulation.pipeline import Machine, Outcome
from lit_rlsched.simulation.workload import Workload

SIZES: dict[str, dict[str, int]] = {
    "1.5B": {"slots": 256, "prompts_per_round": 32, "max_completion_length": 4096},
    "7B": {
        **{"slots": 512, "engines": 8, "ranks": 8, "prompts_per_round": 64},
        "max_completion_length": 8192,
    },
}
LENGTHS = {"1.5B": (600, 1.0), "7B": (1500, 0.8)}
"""Median and sigma."""
PARAMETERS = {"1.5B": 1.5e9, "7B": 7e9}
ROWS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("RolloutWindow", {"prompts_in_flight": rounds, "overtake": overtake})
        for rounds, overtake in ((2, 0), (3, 0), (4, 0), (3, 1), (3, 2), (4, 2), (2, 99), (3, 99))
    ),
    ("AsyncRollout", {}),
    ("AsyncRollout", {"max_staleness": 2, "too_old": "wait"}),
    ("AsyncRollout", {"max_staleness": 2, "too_old": "wait", "prompts_in_flight": 2}),
    ("AsyncRollout", {"max_staleness": 1, "too_old": "wait", "prompts_in_flight": 1}),
    *(
        ("SortedBatching", {"mode": mode, "pool_rounds": rounds})
        for mode in ("on_policy", "partial")
        for rounds in (4, 8)
    ),
    ("TailBatching", {}),
    ("DownSampling", {"keep": 4}),
]
"""Callbacks with their arguments; prompts in flight are in rounds, an `overtake` of 99 is any."""
STREAMED = ("RolloutWindow", "SortedBatching", "TailBatching")


def simulate(
    model: str, accepted: Sequence[float], shared: bool, rounds: int
) -> Iterator[tuple[str, Outcome]]:
    """Simulate plain rounds, each schedule, and the rules of other packages."""
    about: dict[str, Any] = {**DEFAULTS, **SIZES[model]}
    prompts, limit = about["prompts_per_round"], about["max_completion_length"]
    number = 4 * (rounds + WARM_UP) * prompts
    work = Workload.lognormal(*LENGTHS[model], limit, number, about["num_generations"])
    costs = computed("h100", PARAMETERS[model], about["ranks"], Costs())
    machine = Machine(about["slots"], about["engines"], 2.0 if shared else 1.0, 0.5, accepted)
    setting, facts = Setting(about, work, costs, machine, rounds), beside(facts_of(about))
    yield "plain", setting.outcome(make_schedule([], facts))
    for name, given in ROWS:
        said = ", ".join(f"{key}={value}" for key, value in given.items())
        title = f"`{name}({said})`".replace("prompts_in_flight", "rounds in flight")
        if "prompts_in_flight" in given:
            given = given | {"prompts_in_flight": given["prompts_in_flight"] * prompts}
        streams = ["StreamedTraining"] if name in STREAMED and not shared else []
        yield title, setting.outcome(make_schedule(callbacks((name, given), *streams)(), facts))
    yield from ((peer.name, peer.outcome) for peer in setting.peers())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each model on devices of their own and on shared ones."""
    parser = results.parser("twin", __doc__)
    parser.add_argument("--models", nargs="*", default=[*LENGTHS], choices=LENGTHS, help="sizes")
    parser.add_argument("--accepted", type=float, nargs="+", default=[0.95], help="by age")
    parser.add_argument("--rounds", type=int, default=12, help="rounds that are simulated")
    options = results.parse(parser, arguments)
    names = "x | seconds | steps | idle | discarded | age | length | cache"
    for model in options.models:
        for where, shared in {"own devices": False, "shared devices": True}.items():
            print(f"\n{model}, {where}:\n\n| | {names} |\n|{'---|' * 9}")
            plain = 0.0
            for name, of in simulate(model, options.accepted, shared, options.rounds):
                plain = plain or of.seconds
                x = plain / of.seconds
                results.add(f"{model}, {where}, {name}", {"x": x, "seconds": of.seconds})
                print(
                    f"| {name} | {x:.2f} | {of.seconds:.1f} | {of.decode_steps:,.0f} | "
                    f"{of.idle_share:.0%} | {of.discarded_share:.0%} | {of.age:.2f} | "
                    f"{of.length_bias:.2f} | {of.peak_kv:,} |",
                    flush=True,
                )
