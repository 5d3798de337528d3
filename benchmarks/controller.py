"""What the trainer's process computes for each token that engines draw.

    python -m benchmarks run controller

Engines in processes of their own, simulated: each answers as fast as it can, with the messages of a
real one. The CPU time of the trainer's process alone is counted, from the first request to the last
completion: messages, slots, events and completions, without rewards. How many engines one process
can serve follows from it.

With `--completions` engines in the same process report completions that have ended, not tokens:
what the scheduler alone takes.
"""

import statistics
import time
from collections.abc import Sequence

from benchmarks import results
from benchmarks.engines import GROUP, in_turns, make_groups
from lit_rlsched.engines import ProcessEngine, SimulatedEngine
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec


class Exactly:
    """Completions are as long as they may be."""

    def __call__(self, request: object) -> int:
        return int(request.sampling.max_completion_length)  # type: ignore[attr-defined]


def cost(engines: int, slots: int, limit: int, rounds: int) -> tuple[float, int]:
    """Return the median CPU seconds of the trainer's process for a token, and the tokens."""
    engine = ProcessEngine(SimulatedEngine(Exactly(), max_jump=1))
    pool = EnginePool.of(engine, engines)
    pool.start(EngineSpec("", slots * engines, 2 * limit, (1,)))
    prompts, seconds, tokens = slots * engines // GROUP, [], 0
    try:
        for number in range(rounds + 1):
            groups = make_groups(prompts, limit, number)
            tokens = GROUP * sum(g.sampling.max_completion_length for g in groups)
            began = time.process_time()
            in_turns(pool, slots * engines, groups)
            if number:  # the first round warms up
                seconds.append((time.process_time() - began) / tokens)
    finally:
        pool.close()
    return statistics.median(seconds), tokens


def scheduling(engines: int, slots: int, limit: int) -> tuple[float, int]:
    """Return the CPU seconds of a completion if engines report no tokens, and the completions."""
    simulated = [SimulatedEngine(Exactly(), length_only=True, stream=False) for _ in range(engines)]
    pool = EnginePool(simulated)
    pool.start(EngineSpec("", slots * engines, 2 * limit, (1,)))
    groups = make_groups(4 * slots * engines // GROUP, limit, 1)
    began = time.process_time()
    in_turns(pool, slots * engines, groups)
    return (time.process_time() - began) / (GROUP * len(groups)), GROUP * len(groups)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of engines."""
    parser = results.parser("controller", __doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers")
    parser.add_argument("--slots", type=int, default=64, help="completions that an engine decodes")
    parser.add_argument("--limit", type=int, default=1000, help="maximum tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first")
    parser.add_argument("--completions", action="store_true", help="the scheduler alone")
    options = results.parse(parser, arguments)
    if options.completions:
        print("| engines | completions | µs of CPU a completion |\n|---|---|---|")
        for engines in options.engines:
            seconds, number = scheduling(engines, options.slots, options.limit)
            print(f"| {engines} | {number:,} | {1e6 * seconds:.1f} |", flush=True)
            results.add(engines, {"cpu_us_a_completion": 1e6 * seconds, "completions": number})
        return
    print(
        "| engines | tokens a round | µs of CPU a token | tokens a second that one core can take |"
    )
    print("|---|---|---|---|")
    for engines in options.engines:
        seconds, tokens = cost(engines, options.slots, options.limit, options.rounds)
        print(f"| {engines} | {tokens:,} | {1e6 * seconds:.2f} | {1 / seconds:,.0f} |", flush=True)
        results.add(engines, {"cpu_us_a_token": 1e6 * seconds, "tokens": tokens})


if __name__ == "__main__":
    main()
