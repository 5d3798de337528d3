"""List of the benchmarks: what each shows, how long it takes and what it simulates."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A line of `python -m benchmarks list`."""

    shows: str
    minutes: float
    """Duration with the default arguments on an otherwise idle Intel Xeon. For `memory` and `host`
    extrapolated from a part.
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
        "schedules at GPU-like costs of 1.5B and 7B parameters",
        5,
        "engine, its seconds, lengths, acceptance",
    ),
    "memory": Benchmark(
        "cache of a group by group size, slots and budget, counted by vLLM", 15, RANDOM
    ),
    "host": Benchmark(
        "cost of a decode step without the model, by part: instructions and CPU seconds",
        5,
        RANDOM,
    ),
    "learning": Benchmark(
        "accuracy and decode slot-steps of sorted batching's modes on the quick task",
        25,
        resumes=True,
    ),
    "selection": Benchmark(
        "CPU seconds, completions and tokens to an accuracy, by what is drawn and trained on",
        180,
        resumes=True,
    ),
    "seconds": Benchmark(
        "accuracy over seconds on the chat model: TRL, plain GRPO, the schedules; README's picture",
        240,
        on="2 cores",
        resumes=True,
    ),
    "repetition": Benchmark(
        "memory and time of an update with repeated and with shared prompts", 10, RANDOM
    ),
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
}
