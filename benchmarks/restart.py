"""Cost of restarting vLLM with its model split over more or fewer processes.

    python -m benchmarks run restart --sizes 1 2 1 2

The model is `--model`, or a random one with 30 million parameters. Seconds depend on this machine
and on its load. The first start imports vLLM. A step decodes one token for each of 32 requests.
"""

from collections.abc import Sequence
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from benchmarks import results
from benchmarks.ledger import make_model
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.training.policy import load_policy, named_weights
from lit_rlsched.types import Request, Sampling

SLOTS, TOKENS = 32, 64


class Figures(NamedTuple):
    """Seconds of one start."""

    size: int
    start: float
    sync: float
    step: float
    close: float


def measure(model: str, sizes: Sequence[int]) -> list[Figures]:
    """Start, use and close an engine with each size in turn."""
    policy, engine, figures = load_policy(model), VLLMEngine(), []
    spec = EngineSpec(model, SLOTS, 2 * TOKENS, ())
    for size in sizes:
        engine.tensor_parallel_size = size
        began = perf_counter()
        engine.start(spec)
        started = perf_counter()
        engine.sync_weights(named_weights(policy), 0)
        synced = perf_counter()
        prompt = list(range(5, 13))
        engine.submit([Request(f"r{i}", prompt, i, Sampling(TOKENS)) for i in range(SLOTS)])
        steps = []
        for _ in range(TOKENS):
            before = perf_counter()
            engine.step()
            steps.append(perf_counter() - before)
        drawn = perf_counter()
        engine.close()
        closed = perf_counter()
        figures.append(
            Figures(size, started - began, synced - started, median(steps), closed - drawn)
        )
    return figures


def table(figures: Sequence[Figures]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| size | start, s | weight sync, ms | decode step, ms | close, s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.size} | {f.start:.1f} | {1000 * f.sync:.0f} | {1000 * f.step:.1f} | {f.close:.1f} |"
        for f in figures
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = results.parser("restart", __doc__)
    parser.add_argument("--model", help="folder of a checkpoint; a random model if not given")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1, 2, 1, 2],
        help="tensor-parallel sizes to start with, in order",
    )
    args = results.parse(parser, arguments)
    with TemporaryDirectory() as folder:
        if args.model is None:
            make_model(folder, "30M")
        figures = measure(args.model or folder, args.sizes)
        for number, one in enumerate(figures):
            results.add(f"start {number}", one._asdict())
        print(table(figures))


if __name__ == "__main__":
    main()
