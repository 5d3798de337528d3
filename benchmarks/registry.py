"""Which benchmarks there are, and what each shows, costs and simulates."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A line of `python -m benchmarks list`."""

    shows: str
    minutes: float
    """With the default arguments, on an Intel Xeon where nothing else runs. Of `memory`, `host` and
    `ledger` estimated from a part, of `gpu-check` planned."""
    simulated: str = "nothing"
    on: str = "1 core"
    """What it keeps busy."""
    resumes: bool = False
    """Whether what is done already for the same commit and arguments is not done again."""
    module: str = ""
    """Where it has not the benchmark's name: its `main(arguments)` is called."""

    @property
    def costs(self) -> str:
        """For people."""
        time = f"{self.minutes:.0f} min" if self.minutes >= 1 else f"{60 * self.minutes:.0f} s"
        return f"{time}, {self.on}" + (", resumes" if self.resumes else "")


RANDOM = "nothing (random weights)"

BENCHMARKS = {
    "counts": Benchmark(
        "schedules, update, LM head and decode loop, counted; fails where one takes more than "
        "recorded",
        0.5,
        "engine, lengths (the loop: nothing)",
    ),
    "trl": Benchmark(
        "TRL and us on the quick task: completions per CPU second, positions, accuracy",
        10,
        on="2 cores",
    ),
    "steps": Benchmark(
        "decode steps of each schedule on recorded completions, against the lower bound",
        18,
        "engine; lengths of published shapes",
    ),
    "memory": Benchmark(
        "cache of a group by group size, slots and budget: vLLM's own block counts", 15, RANDOM
    ),
    "speed": Benchmark(
        "seconds of the schedules on vLLM, what scheduling itself costs, the planner's time", 12
    ),
    "host": Benchmark(
        "what a decode step costs beside the model, by part: instructions and CPU seconds",
        5,
        RANDOM,
    ),
    "bubbles": Benchmark(
        "idle slots and wasted tokens of sorted batching on its paper's shape",
        0.5,
        "engine, lengths",
    ),
    "learning": Benchmark(
        "accuracy and decode slot-steps of sorted batching's modes on the quick task",
        25,
        resumes=True,
    ),
    "selection": Benchmark(
        "CPU seconds and trained completions to an accuracy, by rule of down-sampling",
        180,
        resumes=True,
    ),
    "repetition": Benchmark(
        "memory and time of an update with the prompt repeated and shared", 10, RANDOM
    ),
    "ledger": Benchmark(
        "what `lit-rlsched estimate` says against the memory that runs take", 15, RANDOM
    ),
    "lm_head": Benchmark(
        "kernels and bytes of the LM head, forward and backward", 0.2, "tensors without values"
    ),
    "precision": Benchmark("how far the trainer's log-probs are from vLLM's, by precision", 4),
    "tails": Benchmark(
        "round times of tail batching on its paper's shape, drafts by age and distance",
        20,
        "engine, its seconds, lengths, policies",
    ),
    "rollpacker": Benchmark(
        "seconds and decode steps to an accuracy with tail batching and streamed training",
        30,
        on="2 cores",
        resumes=True,
    ),
    "parallelism": Benchmark(
        "sizes that the parallelism planner chooses, and preemptions",
        0.05,
        "GPUs, caches, lengths",
    ),
    "restart": Benchmark("seconds to start vLLM anew with another size", 2, RANDOM, on="2 cores"),
    "gpu-check": Benchmark(
        "what must hold on an NVIDIA GPU, check by check (docs/gpu.md)",
        30,
        RANDOM,
        on="1 H100 (a plan)",
        module="benchmarks.gpu_check.__main__",
    ),
    "record": Benchmark("makes the recording that `steps` and `speed` replay", 3),
    "shapes": Benchmark(
        "makes a random model of a real model's shape", 0.2, module="benchmarks.gpu_check.shapes"
    ),
}
