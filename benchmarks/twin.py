"""Schedules where a decode step costs the same with few rows and with many, as on a GPU.

    python -m benchmarks run twin
    make real-model; python -m benchmarks run twin --measure 12

All is simulated, and the costs are those that `lit-rlsched simulate --gpu h100` computes. Lengths
are log-normal. On shared devices engine and trainer take turns, and no gradients are streamed.
With `--trace runs/papers/few_rows,_plain`, `few rows` has the lengths and costs of that row of
`papers`.

`--accepted` is the share of drafts that a policy one round younger accepts whole, perhaps followed
by those of policies two, three, ... rounds younger; of older drafts as much per round. The new
policy reads each draft; those that it cuts are read once more by each policy that drew them.

`x` is times as fast as plain rounds, by completions; `length` is trained over drawn.

`--measure N` simulates nothing. The chat model trains for N rounds of 16 completions, of at most
512 tokens, on rewards that are chance; minutes of a core each. Printed is what the policies one,
two and three rounds later accept of these, by block verification: the expected share of the tokens,
and of the completions that are accepted whole.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from benchmarks import results
from benchmarks.papers.rows import MODEL, callbacks
from lit_rlsched.callbacks.what_if import WARM_UP, Setting, beside
from lit_rlsched.cli.simulate import DEFAULTS, facts_of
from lit_rlsched.run.switches import make_schedule
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.simulation.costs import Costs, calibrated, computed
from lit_rlsched.simulation.pipeline import Machine, Outcome
from lit_rlsched.simulation.workload import Workload

FEW = "few rows"
SIZES: dict[str, dict[str, int]] = {
    "1.5B": {"slots": 256, "prompts_per_round": 32, "max_completion_length": 4096},
    "7B": {
        **{"slots": 512, "engines": 8, "ranks": 8, "prompts_per_round": 64},
        "max_completion_length": 8192,
    },
    FEW: {"slots": 8, "prompts_per_round": 2, "num_generations": 4, "max_completion_length": 512},
}
LENGTHS = {"1.5B": (600, 1.0), "7B": (1500, 0.8)}
"""Median and sigma."""
PARAMETERS = {"1.5B": 1.5e9, "7B": 7e9}
ROWS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("RolloutWindow", {"prompts_in_flight": rounds, "overtake": overtake})
        for rounds, overtake in (
            *((2, 0), (3, 0), (4, 0), (3, 1), (3, 2), (4, 2)),
            *((2, 1000), (3, 1000)),  # which bounds nothing
        )
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
"""Callbacks with their arguments; prompts in flight are counted in rounds."""
STREAMED = ("RolloutWindow", "SortedBatching", "TailBatching")
AGES = (1, 2, 3)


def simulate(
    model: str, accepted: Sequence[float], shared: bool, rounds: int, trace: str | None
) -> Iterator[tuple[str, Outcome]]:
    """Simulate plain rounds, each schedule, and the rules of other packages."""
    about: dict[str, Any] = {**DEFAULTS, **SIZES[model]}
    prompts, limit = about["prompts_per_round"], about["max_completion_length"]
    number = 4 * (rounds + WARM_UP) * prompts
    if trace is not None:
        newest = Traces(trace).newest(rounds)
        work, costs = Workload.of_run(newest), calibrated(newest)
    else:
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


def measure(rounds: int) -> dict[int, list[tuple[int, float, float]]]:
    """Train the chat model; return tokens, those accepted, and chance of all of them, by age."""
    from lightning import Trainer, seed_everything

    from benchmarks.papers.child import PROMPTS, TASK
    from benchmarks.papers.rows import parity
    from lit_rlsched import GRPOModule, RolloutDataModule
    from lit_rlsched.callbacks import RolloutCallback
    from lit_rlsched.data.tasks import ReasoningGym
    from lit_rlsched.engines import VLLMEngine
    from lit_rlsched.training.block_verification import prefix_weights
    from lit_rlsched.training.weight_sync import PolicyReader

    found: dict[int, list[tuple[int, float, float]]] = {age: [] for age in AGES}

    class Later(RolloutCallback):
        def __init__(self) -> None:
            self.rounds: list[tuple[list[Any], list[Any]]] = []

        def on_round_end(self, trainer: Any, pl_module: Any, round: Any) -> None:
            for age in AGES[: len(self.rounds)]:
                prompts, completions = self.rounds[-age]
                rows = PolicyReader(pl_module.model).logprobs(prompts, completions, 1.0)
                for completion, logp in zip(completions, rows, strict=True):
                    old = logp.new_tensor(completion.logprobs)
                    kept = prefix_weights(logp, old)[1:].exp()
                    found[age].append((len(kept), float(kept.sum()), float(kept[-1])))
            drawn = [(s.group.prompt, s.completion.copy()) for s in round.samples]
            self.rounds.append(([p for p, _ in drawn], [c for _, c in drawn]))

    seed_everything(0, verbose=False)
    data = RolloutDataModule(
        ReasoningGym(TASK, "train", PROMPTS).rows(),
        [parity],
        engine=VLLMEngine(),
        prompts_per_round=4,
        num_generations=4,
        max_completion_length=512,
        micro_batch_tokens=2048,
    )
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    how: dict[str, Any] = {"max_epochs": rounds, "accelerator": "cpu", **dict.fromkeys(off, False)}
    trainer = Trainer(callbacks=[Later()], **how)
    trainer.fit(GRPOModule(MODEL, learning_rate=1e-5), datamodule=data)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each model on devices of their own and on shared ones, or what is kept."""
    parser = results.parser("twin", __doc__)
    parser.add_argument("--models", nargs="*", default=[*LENGTHS], choices=LENGTHS, help="sizes")
    parser.add_argument("--accepted", type=float, nargs="+", default=[0.95], help="by age")
    parser.add_argument("--rounds", type=int, default=12, help="rounds that are simulated")
    parser.add_argument("--trace", help="simulate `few rows` instead, with those of a run")
    parser.add_argument("--measure", type=int, metavar="N", help="rounds of the chat model")
    options = results.parse(parser, arguments)
    if options.measure:
        print(f"| rounds later | tokens | whole | completions | length |\n|{'---|' * 5}")
        for age, drafts in measure(options.measure).items():
            tokens = sum(length for length, *_ in drafts)
            share = sum(kept for _, kept, _ in drafts) / tokens
            whole, number = fmean(chance for *_, chance in drafts), len(drafts)
            results.add(age, {"tokens": share, "whole": whole, "completions": number})
            print(f"| {age} | {share:.1%} | {whole:.1%} | {number} | {tokens / number:.0f} |")
        return
    names = "x | seconds | steps | idle | discarded | age | length | cache"
    for model in [FEW] if options.trace else options.models:
        for where, shared in {"own devices": False, "shared devices": True}.items():
            print(f"\n{model}, {where}:\n\n| | {names} |\n|{'---|' * 9}")
            plain = 0.0
            for name, of in simulate(
                model, options.accepted, shared, options.rounds, options.trace
            ):
                plain = plain or of.seconds
                x = plain / of.seconds
                results.add(f"{model}, {where}, {name}", {"x": x, "seconds": of.seconds})
                print(
                    f"| {name} | {x:.2f} | {of.seconds:.1f} | {of.decode_steps:,.0f} | "
                    f"{of.idle_share:.0%} | {of.discarded_share:.0%} | {of.age:.2f} | "
                    f"{of.length_bias:.2f} | {of.peak_kv:,} |",
                    flush=True,
                )
