"""List of the benchmarks: what each shows, how long it takes and what it simulates."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A line of `python -m benchmarks list`."""

    shows: str
    minutes: float
    """Duration with the default arguments on an otherwise idle Intel Xeon. For `memory`, `host` and
    `ledger` extrapolated from a part, for `gpu-check` planned.
    """
    simulated: str = "nothing"
    on: str = "1 core"
    """Hardware that it uses."""
    resumes: bool = False
    """Whether runs that are complete for the same commit and arguments are not repeated."""
    module: str = ""
    """Module with `main(arguments)`, if its name is not that of the benchmark."""

    @property
    def costs(self) -> str:
        """Duration and hardware as text."""
        time = f"{self.minutes:.0f} min" if self.minutes >= 1 else f"{60 * self.minutes:.0f} s"
        return f"{time}, {self.on}" + (", resumes" if self.resumes else "")


RANDOM = "nothing (random weights)"

BENCHMARKS = {
    "counts": Benchmark(
        "counts of schedules, update, LM head and decode loop; fails if one has become higher",
        0.5,
        "engine, lengths (the loop: nothing)",
    ),
    "trl": Benchmark(
        "TRL and this package on the quick task: completions per CPU second, positions, accuracy",
        10,
        on="2 cores",
    ),
    "controller": Benchmark(
        "CPU time of the trainer's process for each token that engines draw",
        2,
        "engines",
        on="2 cores",
    ),
    "environments": Benchmark(
        "seconds of rounds whose tools take time, against lockstep, held slots and TRL",
        15,
        "seconds of the tools",
        module="benchmarks.environments.main",
    ),
    "papers": Benchmark(
        "schedules on a real chat model of 135 M parameters: seconds, steps and memory of a round",
        180,
        "lengths: recorded once from the same model",
        on="2 cores",
        resumes=True,
        module="benchmarks.papers.main",
    ),
    "fidelity": Benchmark(
        "simulated steps and seconds of schedules against those of real runs of the chat model",
        160,
        "the predictions; lengths: recorded once from the same model",
        on="2 cores",
        resumes=True,
        module="benchmarks.fidelity.main",
    ),
    "twin": Benchmark(
        "schedules at GPU-like costs of 1.5B and 7B parameters; acceptance of drafts by age",
        5,
        "engine, its seconds, lengths, acceptance",
    ),
    "steps": Benchmark(
        "decode steps of each schedule on recorded completions, and the lower bound",
        18,
        "engine; lengths of published shapes",
    ),
    "memory": Benchmark(
        "cache of a group by group size, slots and budget, counted by vLLM", 15, RANDOM
    ),
    "speed": Benchmark(
        "seconds of the schedules with vLLM, and the cost of scheduling and planning itself", 12
    ),
    "speculation": Benchmark(
        "seconds with draft tokens by slots and settings, steps saved on recordings, step times", 15
    ),
    "host": Benchmark(
        "cost of a decode step without the model, by part: instructions and CPU seconds",
        5,
        RANDOM,
    ),
    "bubbles": Benchmark(
        "idle slots and wasted tokens of sorted batching on its paper's shape",
        1.5,
        "engine, lengths",
    ),
    "picture": Benchmark(
        "the README's picture: the same completions under four schedules, slot by slot",
        0.2,
        "engine, lengths",
    ),
    "learning": Benchmark(
        "accuracy and decode slot-steps of sorted batching's modes on the quick task",
        25,
        resumes=True,
    ),
    "selection": Benchmark(
        "CPU seconds and completions to reach an accuracy, by rule of down-sampling",
        180,
        resumes=True,
    ),
    "repetition": Benchmark(
        "memory and time of an update with repeated and with shared prompts", 10, RANDOM
    ),
    "lm_head": Benchmark(
        "kernels and bytes of the LM head, forward and backward", 0.2, "tensors without values"
    ),
    "precision": Benchmark("differences between log-probs of trainer and vLLM, by precision", 4),
    "adapters": Benchmark(
        "weight syncs and steps of vLLM with merged LoRA weights, and with adapters alone",
        2,
        RANDOM,
    ),
    "tails": Benchmark(
        "round times of tail batching on its paper's shape; accepted drafts by age and distance",
        20,
        "engine, its seconds, lengths, policies",
    ),
    "rollpacker": Benchmark(
        "seconds and decode steps to reach an accuracy with tail batching and streamed training",
        30,
        on="2 cores",
        resumes=True,
    ),
    "ahead_rollout": Benchmark(
        "seconds per round when the next round is drawn during the update",
        30,
        on="2 cores",
        resumes=True,
    ),
    "overlap": Benchmark(
        "seconds of a round when rounds are drawn ahead, on RollPacker's shape with 16 engines",
        3,
        "engine, its seconds, lengths, policies, update",
    ),
    "drain": Benchmark(
        "decode steps and idle slots of rounds whose free slots begin the next, on the quick task",
        10,
    ),
    "kept": Benchmark("share of drafts that later policies keep, on the quick task", 8),
    "draft_law": Benchmark(
        "whether verified drafts are draws of the newest policy, with vLLM; mistakes that it finds",
        15,
        RANDOM,
    ),
    "bias": Benchmark(
        "bias of the expected gradient under each schedule, exactly; effect of a differing engine",
        1,
        "engine; policies are tables",
    ),
    "gradient_bias": Benchmark(
        "the same, estimated on the quick task's model at frozen weights", 25, resumes=True
    ),
    "parallelism": Benchmark(
        "sizes that the parallelism planner chooses, and their preemptions",
        0.05,
        "GPUs, caches, lengths",
    ),
    "ranks": Benchmark(
        "seconds, CPU seconds and messages of one and of two trainer processes", 5, on="2 cores"
    ),
    "startup": Benchmark(
        "seconds and memory of a start with up to a million prompts, and of a round of tokens",
        15,
        "text of the prompts, tokens of the round",
        on="2 cores",
    ),
    "restart": Benchmark("seconds to restart vLLM with another size", 2, RANDOM, on="2 cores"),
    "engines": Benchmark(
        "tokens per second of two engines on the logical clock, free-running, and against one",
        18,
        RANDOM,
        on="2 cores",
    ),
    "real_engines": Benchmark(
        "tables of `bubbles` and `tails`, shrunk, on 1, 2 and 4 real engines and simulated ones",
        8,
        "lengths; for comparison the engines; policies do not change",
        on="2 cores",
    ),
    "gpu-check": Benchmark(
        "checks on an NVIDIA GPU (docs/howto/gpu.md)",
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
