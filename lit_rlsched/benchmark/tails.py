"""Round times of RollPacker's tail batching against plain rounds, on the paper's shape.

    python -m lit_rlsched.benchmark.tails

Deterministic: drawn lengths go through the controller and the round policy of a run, on the
simulated engine. 128 prompts of 8 completions, at most 16k tokens, the longest of a round some 25
to 32 times the median (arXiv 2509.21009). What lost a race is drawn anew with another length. The
lengths of a prompt's completions are alike (half of the variance of their logarithm is the
prompt's) or not at all. Means over 100 rounds, the long ones included.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import exp, sqrt
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from lit_rlsched.benchmark.replay import Drawn, Unscored, draw_rounds
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.audit import Attempt, length_bias
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.types import Completion, Group, Prompt, Request, Sampling, stable_hash
from lit_rlsched.rollout.worker import RolloutWorker
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.rounds import FullRound, RoundPolicy, TailRound, is_long

PROMPTS, GENERATIONS, LIMIT = 128, 8, 16384
MEDIAN, SIGMA = 550, 1.1
METHODS: dict[str, RoundPolicy] = {
    "synchronous": FullRound(PROMPTS),
    "prompts race": TailRound(PROMPTS, GENERATIONS),
    "prompts race, 1.5": TailRound(PROMPTS, GENERATIONS, 1.5),
    "completions race as well": TailRound(PROMPTS, GENERATIONS, race="completion"),
    "completions race alone": TailRound(PROMPTS, GENERATIONS, 1.0, race="completion"),
}


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths, of which the prompt decides a share.

    Args:
        shared: Share of the variance of the logarithm that is the prompt's.
    """

    shared: float

    def __call__(self, request: Request) -> int:
        """Another seed, another length."""
        own = _normal("completion", request.seed)
        of_prompt = _normal("prompt", request.prompt_ids[0])
        z = sqrt(self.shared) * of_prompt + sqrt(1 - self.shared) * own
        return min(LIMIT, max(1, round(MEDIAN * exp(SIGMA * z))))


def _normal(*key: object) -> float:
    return NormalDist().inv_cdf((stable_hash(*key) + 0.5) / 2**63)


class Figures(NamedTuple):
    """Of a round; its tokens are forgotten, as a hundred rounds have a hundred million."""

    long: bool
    seconds: float
    steps: int
    lengths: list[int]
    """Of every stay in a slot."""
    discarded: int
    trained: list[int]
    first: list[Attempt]
    """What was drawn for the first time."""

    @classmethod
    def of(cls, drawn: Drawn) -> "Figures":
        """What the table needs."""
        trace, harvest = drawn.trace, drawn.harvest
        return cls(
            is_long(drawn.plan),
            trace.seconds,
            trace.decode_steps,
            trace.spans["tokens"],
            sum(a.tokens for a in harvest.discarded),
            [len(c.token_ids) for g in harvest.trained for c in g.completions],
            [a for a in harvest.ran if a.first],
        )


def rounds(policy: RoundPolicy, shared: float, slots: int, n: int) -> list[Figures]:
    """The first rounds of a run."""
    engine = SimulatedEngine(lengths=Lengths(shared), stream=False)
    engine.start(EngineSpec("", slots=slots, max_model_len=LIMIT + 1, eos_token_ids=(0,)))
    worker = RolloutWorker(engine, Admission(slots))
    controller = RolloutController(worker, Unscored(), seed=0)  # type: ignore[arg-type]
    launched = policy.launched(GENERATIONS)
    source = (
        Group(
            str(p),
            Prompt(str(p), "", (1 + p,)),
            Sampling(LIMIT),
            [Completion(c) for c in range(launched)],
        )
        for p in count()
    )
    return [Figures.of(drawn) for drawn in islice(draw_rounds(source, policy, controller), n)]


def row(name: str, drawn: Sequence[Figures], plain: float | None) -> tuple[str, float]:
    """A method as Markdown, and its mean seconds."""
    kinds = ([d.steps for d in drawn if d.long == long] for long in (False, True))
    seconds = fmean(d.seconds for d in drawn)
    tokens = sum(sum(d.lengths) for d in drawn)
    trained = [length for d in drawn for length in d.trained]
    first = [attempt for d in drawn for attempt in d.first]
    cells = [
        name,
        *(f"{fmean(steps):,.0f}" if steps else "" for steps in kinds),
        f"{fmean(d.steps for d in drawn):,.0f}",
        f"{seconds:.1f}",
        "" if plain is None else f"{plain / seconds:.2f}x",
        f"{1 - sum(d.discarded for d in drawn) / tokens:.0%}",
        f"{length_bias(trained, first):.2f}",
    ]
    return f"| {' | '.join(cells)} |", seconds


def table(shared: float, slots: int, n: int) -> str:
    """All methods, as Markdown."""
    lines = [
        "| | decode steps of a short round | of a long one | mean | seconds | faster "
        "| useful tokens | trained over drawn length |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = None
    for name, policy in METHODS.items():
        drawn = rounds(policy, shared, slots, n)
        line, seconds = row(name, drawn, plain)
        if plain is None:
            plain = seconds
            spread = fmean(max(d.lengths) / median(d.lengths) for d in drawn)
            head = f"{slots} slots, {shared:.0%} of the variance the prompt's; longest over median"
            lines.insert(0, f"{head} {spread:.0f}\n")
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        "python -m lit_rlsched.benchmark.tails",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--slots", type=int, nargs="+", default=[1600, 256])
    parser.add_argument("--shared", type=float, nargs="+", default=[0.5, 0.0])
    options = parser.parse_args(arguments)
    for slots in options.slots:
        for shared in options.shared:
            print(table(shared, slots, options.rounds), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
