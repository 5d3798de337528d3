"""Which benchmarks there are, and what each shows, costs and simulates."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A line of `python -m benchmarks list`."""

    shows: str
    minutes: float
    """Of the default arguments on a 2-core Intel Xeon; `gpu-check`: on an H100, as planned."""
    cores: int
    simulated: str
    resumes: bool = False
    """Whether what is done already for the same commit and arguments is not done again."""
    module: str = ""
    """Where it has not the benchmark's name: its `main(arguments)` is called."""

    @property
    def costs(self) -> str:
        """For people."""
        time = f"{self.minutes:.0f} min" if self.minutes >= 1 else f"{60 * self.minutes:.0f} s"
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return f"{time}, {cores}" + (", resumes" if self.resumes else "")


BENCHMARKS = {
    "counts": Benchmark(
        "counts of schedules, updates, LM head and decode loop; fails where one is worse than "
        "recorded",
        0.9,
        1,
        "engine, lengths (vLLM's part: nothing)",
    ),
    "trl": Benchmark(
        "the quick task with TRL and with us: completions per CPU second, positions, accuracy",
        10,
        2,
        "nothing",
    ),
    "steps": Benchmark(
        "decode steps of each schedule on recorded completions, against the lower bound",
        18,
        1,
        "engine; lengths of the published shapes",
    ),
    "memory": Benchmark(
        "cache of a group by group size, slots and budget: vLLM's own block counts",
        5,
        1,
        "nothing",
    ),
    "speed": Benchmark(
        "seconds of the schedules on vLLM, what scheduling itself costs, the planner's time",
        12,
        1,
        "nothing",
    ),
    "host": Benchmark(
        "what a decode step costs beside the model: bytecode instructions and CPU seconds by part",
        5,
        1,
        "nothing",
    ),
    "bubbles": Benchmark(
        "idle slots and wasted tokens of sorted batching on its paper's shape",
        1,
        1,
        "engine, lengths",
    ),
    "learning": Benchmark(
        "accuracy and decode slot-steps of sorted batching's modes on the quick task",
        25,
        1,
        "nothing",
        resumes=True,
    ),
    "selection": Benchmark(
        "CPU seconds and trained completions to an accuracy, by rule of down-sampling",
        180,
        1,
        "nothing",
        resumes=True,
    ),
    "repetition": Benchmark(
        "memory and time of an update with the prompt repeated and shared", 10, 1, "nothing"
    ),
    "ledger": Benchmark(
        "what `lit-rlsched estimate` says against the memory that runs take", 15, 1, "nothing"
    ),
    "lm_head": Benchmark(
        "kernels and bytes of the LM head, forward and backward",
        0.5,
        1,
        "tensors (fake: no values)",
    ),
    "precision": Benchmark(
        "how far the trainer's log-probs are from vLLM's, by precision", 5, 1, "nothing"
    ),
    "tails": Benchmark(
        "round times of tail batching on its paper's shape, drafts by age and distance",
        20,
        1,
        "engine, its seconds, lengths, policies",
    ),
    "rollpacker": Benchmark(
        "seconds and decode steps to an accuracy with tail batching and streamed training",
        30,
        2,
        "nothing",
        resumes=True,
    ),
    "parallelism": Benchmark(
        "sizes that the parallelism planner chooses, and preemptions",
        0.1,
        1,
        "GPUs, caches, lengths",
    ),
    "restart": Benchmark("seconds to start vLLM anew with another size", 2, 2, "nothing"),
    "gpu-check": Benchmark(
        "what must hold on an NVIDIA GPU, check by check (docs/gpu.md)",
        30,
        1,
        "nothing; models have random weights",
        module="benchmarks.gpu_check.__main__",
    ),
    "record": Benchmark(
        "nothing by itself: makes the recording that `steps` and `speed` replay", 3, 1, "nothing"
    ),
    "shapes": Benchmark(
        "nothing by itself: makes a random model of a real model's shape",
        0.2,
        1,
        "weights",
        module="benchmarks.gpu_check.shapes",
    ),
}
