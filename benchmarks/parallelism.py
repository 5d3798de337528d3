"""RollPacker's parallelism planner on eight simulated GPUs.

    python -m benchmarks run parallelism

Deterministic, takes seconds. An 8B model decodes on eight GPUs with 64 GB each: at size `s` there
are `8 / s` replicas, each with `s * 64` GB minus the weights, among which the completions are
divided. Decoding is replayed in chunks of 256 tokens: when the cache of a replica is full, the
newest completion is preempted and waits at the front, as in vLLM. Short rounds race 160 prompts
with 8 completions until 128 are complete; every fifth round runs the deferred prompts. In the
course of the run completions get longer and then shorter again. Preemptions are counted; time is
not modelled.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from statistics import NormalDist, fmean

from benchmarks import results
from lit_rlsched.scheduling.rollpacker import RoundKind, TensorParallelPlanner
from lit_rlsched.types import stable_hash

GPUS = 8
GPU_BYTES, WEIGHT_BYTES, TOKEN_BYTES = 64e9, 16.4e9, 147_456
"""Memory for decoding per GPU, and Qwen3-8B in bfloat16: 36 layers with 8 heads of 128."""
PROMPTS, RACED, GENERATIONS = 128, 160, 8
LIMIT, CHUNK, PROMPT_TOKENS, SIGMA = 32768, 256, 256, 1.0
MEDIANS = [1000] * 10 + [2000 + 400 * i for i in range(10)] + [6000] * 10 + [1500] * 30
"""Median length in each round."""
PHASES = {"short lengths": 10, "growing": 20, "long lengths": 30, "short again": 60}
"""Round at which each phase ends."""

Prompt = list[int]
"""Lengths of the completions of a prompt, in tokens."""


def capacity(size: int) -> int:
    """Return how many tokens the cache of a replica holds."""
    return int((size * GPU_BYTES - WEIGHT_BYTES) / TOKEN_BYTES)


@dataclass(slots=True, eq=False)
class Stay:
    """A completion that has started."""

    prompt: int
    left: int
    held: int = PROMPT_TOKENS


class Replica:
    """A paged cache and the completions in it, the oldest first."""

    def __init__(self, size: int) -> None:
        self.capacity = capacity(size)
        self.waiting: deque[Stay] = deque()
        self.running: list[Stay] = []
        self.preemptions = 0

    def step(self) -> list[int]:
        """Decode one chunk and return the prompts of the completions that finished."""
        used = sum(stay.held for stay in self.running)
        while self.waiting and used + self.waiting[0].held + CHUNK <= self.capacity:
            used += self.waiting[0].held
            self.running.append(self.waiting.popleft())
        while used + CHUNK * len(self.running) > self.capacity:
            newest = self.running.pop()
            used -= newest.held
            self.waiting.appendleft(newest)
            self.preemptions += 1
        for stay in self.running:
            stay.held += CHUNK
            stay.left -= CHUNK
        finished = [stay.prompt for stay in self.running if stay.left <= 0]
        self.running = [stay for stay in self.running if stay.left > 0]
        return finished


def draw_round(prompts: Sequence[Prompt], needed: int, size: int) -> tuple[int, list[int]]:
    """Return the preemptions until this many prompts are complete, and these prompts."""
    replicas = [Replica(size) for _ in range(GPUS // size)]
    stays = [Stay(i, length) for i, prompt in enumerate(prompts) for length in prompt]
    for i, stay in enumerate(stays):
        replicas[i % len(replicas)].waiting.append(stay)
    undecoded, done = [len(prompt) for prompt in prompts], list[int]()
    while len(done) < needed:
        for replica in replicas:
            for prompt in replica.step():
                undecoded[prompt] -= 1
                if not undecoded[prompt]:
                    done.append(prompt)
    return sum(replica.preemptions for replica in replicas), done[:needed]


def fresh_prompts(number: int, median: float) -> list[Prompt]:
    """Return prompts of a short round; half of the variance of log lengths is between prompts."""

    def length(prompt: int, index: int) -> int:
        z = (_normal("prompt", number, prompt) + _normal("own", number, prompt, index)) / 2**0.5
        return min(LIMIT, round(median * exp(SIGMA * z)))

    return [[length(p, i) for i in range(GENERATIONS)] for p in range(RACED)]


def _normal(*key: object) -> float:
    return NormalDist().inv_cdf((stable_hash(*key) + 0.5) / 2**63)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A round."""

    kind: RoundKind
    size: int
    preemptions: int


def simulate(planner: TensorParallelPlanner, medians: Sequence[float]) -> list[Drawn]:
    """A run with tail batching whose sizes the planner chooses."""
    rounds, lost = [], list[Prompt]()
    for number, median in enumerate(medians):
        kind: RoundKind = "long" if len(lost) >= PROMPTS else "short"
        size = planner.size(kind)
        prompts = lost[:PROMPTS] if kind == "long" else fresh_prompts(number, median)
        preemptions, done = draw_round(prompts, PROMPTS, size)
        if kind == "long":
            lost = lost[PROMPTS:]
        else:
            lost += [prompt for i, prompt in enumerate(prompts) if i not in done]
        planner.observe(kind, preemptions)
        rounds.append(Drawn(kind, size, preemptions))
    return rounds


def restarts(rounds: Sequence[Drawn]) -> int:
    """Number of restarts of the engine."""
    return sum(a.size != b.size for a, b in pairwise(rounds))


def table(rounds: Sequence[Drawn], fixed: Sequence[Drawn]) -> str:
    """Return the sizes and the preemptions of each phase, also those with size 1."""
    lines = [
        "| | kind | sizes | preemptions of a round | with a size of 1 |",
        "|---|---|---|---|---|",
    ]
    start = 0
    for phase, end in PHASES.items():
        for kind in ("short", "long"):
            pairs = zip(rounds[start:end], fixed[start:end], strict=True)
            own = [(r, f) for r, f in pairs if r.kind == kind]
            if own:
                sizes = [str(r.size) for r, _ in own]
                shown = [s for i, s in enumerate(sizes) if i == 0 or s != sizes[i - 1]]
                planned = fmean(r.preemptions for r, _ in own)
                whole = fmean(f.preemptions for _, f in own)
                lines.append(
                    f"| {phase} | {kind} | {', '.join(shown)} | {planned:,.0f} | {whole:,.0f} |"
                )
        start = end
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    results.parse(results.parser("parallelism", __doc__), arguments)
    rounds = simulate(TensorParallelPlanner(size=1, maximum=GPUS), MEDIANS)
    fixed = simulate(TensorParallelPlanner(size=1, maximum=1), MEDIANS)
    room = ", ".join(f"{s}: {capacity(s) * GPUS // s / 1e6:.2f}" for s in (1, 2, 4, 8))
    print(f"Million tokens of cache on {GPUS} GPUs, by size: {room}\n")
    print(table(rounds, fixed))
    for number, (own, whole) in enumerate(zip(rounds, fixed, strict=True)):
        figures = {"size": own.size, "preemptions": own.preemptions}
        results.add(f"round {number}", figures | {"preemptions with 1": whole.preemptions})
    print(f"\n{restarts(rounds)} restarts in {len(rounds)} rounds.")


if __name__ == "__main__":
    main()
