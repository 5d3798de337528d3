"""Schedules on several real engines, beside the simulation of the same completions.

    python -m benchmarks run real_engines

The shapes of `bubbles` (SortedRL) and of `tails` (RollPacker) at a size that two cores carry:
lengths are divided by `--shrink`, and a round has a quarter of RollPacker's prompts. Each engine
is a vLLM in a process of its own with the quick task's model, and decodes every token: it cannot
draw EOS before the given length, and draws it there. A completion has the same length whenever it
is drawn, so schedules that train on all completions train on the same tokens.

The slots are divided by the number of engines. The counts are those of the simulation. They follow
from the logical clock, so real engines must count the same: `real engines` names each figure that
differs. `beyond` are decode steps that engines had made beyond the end of a round, as they run
ahead; their tokens are dropped. Seconds are those of the rollouts, without training, with standard
errors over the seeds, each of which has its own lengths. An engine has one thread. The trainer's
process shares the cores with the engines, and more engines than cores draw only the first seed,
without seconds.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from benchmarks import bubbles, results, tails
from benchmarks.common import ENVIRONMENT
from lit_rlsched.cli.malloc import keep_heap
from lit_rlsched.engines import SimulatedEngine, VLLMEngine
from lit_rlsched.engines.placement import available_cores
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.scheduling.admission import Admission, Order
from lit_rlsched.scheduling.round_rule import FullRound, RoundRule
from lit_rlsched.scheduling.sorted_batching import Mode, SortedRound
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.simulation.loop import Visit, simulated_rounds
from lit_rlsched.training.policy import named_weights
from lit_rlsched.types import Prompt, Request, Sampling, stable_hash

MODEL = "examples/countdown/model"
PREFILL = 16384
"""Tokens of a step, enough for all that begin in it."""
PROMPT = 16
"""Tokens of a prompt."""
GENERATIONS, RACING = 8, 10
"""RollPacker: completions of a prompt, and completions that race for these places."""
UPDATE = 32
"""RollPacker: prompts of an update. Four short rounds and a long one train on five updates."""
HEADER = (
    "| engines | | decode steps, busiest engine | all engines | slot-steps | bubble ratio | "
    "discarded tokens | kept for later | simulated seconds over plain | real engines | beyond | "
    "seconds | over plain |"
)
COLUMNS = HEADER.count("|") - 1


class GivenLengths(VLLMEngine):
    """vLLM whose completions have given lengths.

    Args:
        lengths: Length of each completion, by request id.
        prefill: Maximum number of tokens per step; with more, some requests begin a step later.
    """

    def __init__(self, lengths: Mapping[str, int], prefill: int = PREFILL) -> None:
        super().__init__(engine_kwargs={"max_num_batched_tokens": prefill})
        self.lengths = lengths

    def _sampling_params(self, request: Request) -> Any:
        params = super()._sampling_params(request)
        before = self.lengths[request.id] - 1 - len(request.prefix_ids)
        params.min_tokens = min(max(0, before), params.max_tokens)
        params.logit_bias = {self._spec.eos_token_ids[0]: 100.0}
        return params


class Schedule(NamedTuple):
    """A rule and the order in which requests take free slots."""

    rule: RoundRule
    order: Order = "fifo"


@dataclass(frozen=True)
class Shape:
    """Prompts, lengths and schedules of a paper."""

    name: str
    prompts: int
    generations: int
    """Completions of a prompt that are trained on."""
    slots: int
    """Slots of all engines together."""
    limit: int
    """Maximum number of tokens of a completion."""
    lengths: Callable[[int], list[list[int]]]
    """Returns the lengths of a seed: of each prompt, those of its completions."""
    schedules: dict[str, Schedule]
    """Schedules by name; the first is the baseline."""

    def uid(self, seed: int, prompt: int) -> str:
        """Return the name of a prompt."""
        return f"{self.name} {seed}.{prompt}"

    def visits(self, seed: int) -> Iterator[Visit]:
        """Yield the prompts."""
        for p in range(self.prompts):
            uid = self.uid(seed, p)
            tokens = tuple(3 + stable_hash(uid, i) % 60 for i in range(PROMPT))
            yield Visit(Prompt(uid, "", tokens), uid)


def sorted_lengths(shrink: int, prompts: int, seed: int) -> list[list[int]]:
    """Return lengths of SortedRL's shape, shrunk."""
    drawn = bubbles.draw_lengths(seed, 1200, 1.1)
    return [[-(-length // shrink)] for length in drawn[:prompts]]


def tail_lengths(shrink: int, prompts: int, seed: int) -> list[list[int]]:
    """Return lengths of RollPacker's shape, shrunk; half of their variance is the prompt's."""
    lengths, sampling = tails.Lengths(0.5), Sampling(tails.LIMIT)

    def length(prompt: int, completion: int) -> int:
        noise = stable_hash(seed, prompt, completion)
        drawn = lengths(Request("", (stable_hash(seed, prompt),), noise, sampling))
        return -(-drawn // shrink)

    return [[length(p, c) for c in range(RACING)] for p in range(prompts)]


def shapes(shrink: int, size: float = 1.0) -> list[Shape]:
    """Return the shapes to compare.

    Args:
        shrink: Divisor of the lengths.
        size: Prompts and slots, as a multiple of those of the table.
    """
    pool, update = round(size * bubbles.PROMPTS), round(size * bubbles.UPDATE)
    won = round(size * UPDATE)

    def pooled(mode: Mode) -> SortedRound:
        return SortedRound(update, pool, 1, "completion", mode)

    return [
        Shape(
            "SortedRL",
            pool,
            1,
            round(size * 64),
            -(-bubbles.LIMIT // shrink),
            partial(sorted_lengths, shrink, pool),
            {
                "plain": Schedule(FullRound(update)),
                "on-policy": Schedule(pooled("on_policy")),
                "partial": Schedule(pooled("partial")),
            },
        ),
        Shape(
            "RollPacker",
            5 * won,
            GENERATIONS,
            round(size * 512),
            -(-tails.LIMIT // shrink),
            partial(tail_lengths, shrink, 5 * won),
            {
                "plain": Schedule(FullRound(won)),
                "prompts race": Schedule(TailRound(won, GENERATIONS)),
                "completions race as well": Schedule(TailRound(won, GENERATIONS, 1.25, 1.25)),
            },
        ),
    ]


@dataclass
class Counts:
    """What is counted over all rounds; the same on real and on simulated engines."""

    rounds: int = 0
    busiest: int = 0
    """Decode steps of the engine that makes the most in a round."""
    steps: int = 0
    """Decode steps of all engines."""
    slot_steps: int = 0
    busy: int = 0
    """Slot-steps in which a request ran."""
    tokens: int = 0
    trained: int = 0
    discarded: int = 0
    kept: int = 0
    """Tokens of unfinished completions at the end of rounds, for later rounds."""
    moved: int = 0
    """Requests that moved to another engine."""


@dataclass
class Drawn:
    """A draw of all prompts."""

    counts: Counts
    seconds: float
    """Wall time of the rollouts; on simulated engines their virtual time."""
    beyond: int
    """Decode steps beyond the ends of rounds."""


def draw(session: RolloutSession, shape: Shape, schedule: Schedule, seed: int) -> Drawn:
    """Draw all prompts of a seed."""
    engine, slots = session.engine, shape.slots // len(session.engine.engines)
    session.controller.worker = engine.make_worker(Admission(slots, order=schedule.order))
    counts, seconds, beyond = Counts(), 0.0, 0.0
    for drawn in simulated_rounds(
        session,
        shape.visits(seed),
        Sampling(shape.limit),
        shape.generations,
        lambda number: schedule.rule,
    ):
        trace, harvest, steps = drawn.trace, drawn.harvest, Counter[float]()
        places = trace.steps.get("engine", repeat(0))  # a single engine has no such column
        for place, made in zip(places, trace.steps["decode_steps"], strict=False):
            steps[place] += int(made)
        counts.rounds += 1
        counts.busiest += max(steps.values())
        counts.steps += sum(steps.values())
        counts.slot_steps += trace.slot_steps
        counts.busy += trace.busy_slot_steps
        counts.tokens += trace.tokens
        counts.trained += sum(len(c.token_ids) for g in harvest.trained for c in g.completions)
        counts.discarded += harvest.discarded_tokens
        counts.kept += sum(len(c.token_ids) for g in harvest.left for c in g.completions)
        counts.moved += int(drawn.metrics["rollout/moved_requests"])
        simulated = engine.engines[0].virtual_clock
        seconds += trace.seconds if simulated else drawn.metrics["time/rollout"]
        beyond += drawn.metrics.get("rollout/ahead_steps", 0)
    return Drawn(counts, seconds, int(beyond))


def lengths_of(every: Sequence[Shape], seeds: Sequence[int]) -> dict[str, int]:
    """Return the lengths of all shapes and seeds by request id."""
    return {
        f"{shape.uid(seed, p)}/{c}": length
        for shape in every
        for seed in seeds
        for p, group in enumerate(shape.lengths(seed))
        for c, length in enumerate(group)
    }


def simulated_pool(lengths: Mapping[str, int], engines: int) -> EnginePool:
    """Return simulated engines."""
    return EnginePool(
        [SimulatedEngine(lengths, length_only=True, stream=False) for _ in range(engines)]
    )


Draws = dict[tuple[str, str], list[Drawn]]
"""Draws of each seed, by the names of shape and schedule."""


def draw_all(
    engine: EnginePool, model: str, every: Sequence[Shape], seeds: Sequence[int], warm: bool = False
) -> Draws:
    """Start the engines, draw each shape under each schedule, and close the engines.

    With `warm`, a draw of the last shape goes first, so that kernels are compiled before.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    longest = PROMPT + max(shape.limit for shape in every)
    eos = (policy.config.eos_token_id,)
    spec = EngineSpec(model, max(shape.slots for shape in every), longest, eos)
    scorer: Any = Unscored()

    def sync(version: int) -> Mapping[str, float]:
        engine.sync_weights(named_weights(policy), version)
        return {}

    session = RolloutSession(engine, spec, scorer, sync, seed=0)
    draws: Draws = {(shape.name, name): [] for shape in every for name in shape.schedules}
    try:
        if warm:
            draw(session, every[-1], [*every[-1].schedules.values()][-1], seeds[0])
        for number, seed in enumerate(seeds):
            for shape in every:
                order = list(shape.schedules.items())
                first = number % len(order)
                for name, schedule in order[first:] + order[:first]:
                    draws[shape.name, name].append(draw(session, shape, schedule, seed))
    finally:
        session.close()
    return draws


def differences(real: Sequence[Drawn], simulated: Sequence[Drawn]) -> str:
    """Return the counts that differ between real and simulated engines, in any of the seeds."""
    found: dict[str, str] = {}
    for one, other in zip(real, simulated, strict=False):
        ours, theirs = asdict(one.counts), asdict(other.counts)
        found |= {n: f"{n} {ours[n]:,}, not {theirs[n]:,}" for n in ours if ours[n] != theirs[n]}
    return "; ".join(found.values()) or "the same"


def over(draws: Sequence[Drawn], plain: Sequence[Drawn]) -> list[float]:
    """Return the ratio of the seconds of each seed."""
    return [one.seconds / other.seconds for one, other in zip(draws, plain, strict=True)]


def row(
    engines: int, shape: Shape, name: str, simulated: Draws, real: Draws, seeds: Sequence[int]
) -> str:
    """Record the figures of each seed, and return means as a Markdown row."""
    plain = next(iter(shape.schedules))
    for kind, draws in (("simulated", simulated), ("real", real)):
        for seed, one in zip(seeds, draws.get((shape.name, name), []), strict=False):
            figures = {**asdict(one.counts), "beyond": one.beyond, "seconds": one.seconds}
            results.add(f"{shape.name}, {name}, {engines} {kind}, seed {seed}", figures)
    drawn, base = simulated[shape.name, name], simulated[shape.name, plain]
    mean = {
        figure: fmean(getattr(one.counts, figure) for one in drawn)
        for figure in Counts.__dataclass_fields__
    }
    cells = [
        str(engines),
        name,
        *(f"{mean[figure]:,.0f}" for figure in ("busiest", "steps", "slot_steps")),
        f"{1 - mean['busy'] / mean['slot_steps']:.1%}",
        *(f"{mean[figure]:,.0f}" for figure in ("discarded", "kept")),
        "" if name == plain else f"{fmean(over(drawn, base)):.2f}",
    ]
    if real:
        ours = real[shape.name, name]
        cells += [differences(ours, drawn), f"{fmean(one.beyond for one in ours):,.0f}"]
        if engines <= len(available_cores()):
            cells.append(results.with_error([one.seconds for one in ours], 1))
            if name != plain:
                cells.append(results.with_error(over(ours, real[shape.name, plain]), 2))
    cells += [""] * (COLUMNS - len(cells))
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = results.parser("real_engines", __doc__)
    parser.add_argument(
        "--engines", type=int, nargs="*", default=[1, 2, 4], help="numbers of real engines"
    )
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=[16], help="numbers only of simulated engines"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of lengths")
    parser.add_argument("--shrink", type=int, default=32, help="divisor of the papers' lengths")
    parser.add_argument(
        "--prefill", type=int, default=PREFILL, help="vLLM's max_num_batched_tokens"
    )
    options = results.parse(parser, arguments)
    keep_heap()
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    every, seeds = shapes(options.shrink), options.seeds
    lengths = lengths_of(every, seeds)
    tables = [[f"{s.name}: {s.prompts} prompts, {s.slots} slots"] for s in every]
    for table in tables:
        table += ["", HEADER, "|---" * COLUMNS + "|"]
    for n in sorted({*options.engines, *options.simulated}):
        simulated = draw_all(simulated_pool(lengths, n), MODEL, every, seeds)
        real: Draws = {}
        if n in options.engines:
            timed = n <= len(available_cores())
            pool = EnginePool.of(GivenLengths(lengths, options.prefill), n)
            drawn = seeds if timed else seeds[:1]
            real = draw_all(pool, MODEL, every, drawn, warm=timed)
        for table, shape in zip(tables, every, strict=True):
            table += [row(n, shape, name, simulated, real, seeds) for name in shape.schedules]
    print(*("\n".join(table) for table in tables), sep="\n\n")


if __name__ == "__main__":
    main()
