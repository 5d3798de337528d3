"""Tokens per second of two engines: on the logical clock, free-running, and against one engine.

    python -m benchmarks run engines

Draws the same completions in every way of running the engines: of random lengths, with a random
model of 30 million parameters, each engine in a process of its own.

- `turns`: `EnginePool`, whose engines take turns on a logical clock, as in a run.
- `free`: each engine draws the groups that it has in `turns`, and no engine waits for another.
- `first come`: a completion goes to the engine that has a free slot first, so what is drawn where
  depends on timing.
- `one`: a single engine with the cores and the slots of both.
- `ray` (with `--ray`): as `turns`, with engines in Ray actors. Starts and memory are printed too.

Cases: `equal` engines; one of them twice as `slow` (it sleeps as long as each step has taken). Each
with a slot for every completion, and with a slot for one in three.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import results
from benchmarks.common import ENVIRONMENT
from benchmarks.ledger import make_model
from lit_rlsched.cli.malloc import keep_heap
from lit_rlsched.engines import ProcessEngine, RayEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.placement import available_cores
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.remote import RemoteWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.routing import promised_tokens, route
from lit_rlsched.types import Completion, Event, Group, Prompt, Request, Sampling

GROUP = 8
"""Completions per prompt."""
ENGINES: dict[str, type[RolloutEngine]] = {"vllm": VLLMEngine, "transformers": TransformersEngine}


def slowed(engine: type[RolloutEngine], factor: float) -> RolloutEngine:
    """Return an engine whose steps take `factor` times as long on the second of two engines."""

    class Slowed(engine):  # type: ignore[misc, valid-type]
        def step(self) -> list[Event]:
            began = time.perf_counter()
            events: list[Event] = super().step()
            if self._spec.index == 1:
                time.sleep((factor - 1) * (time.perf_counter() - began))
            return events

    return Slowed()


def make_groups(prompts: int, limit: int, seed: int) -> list[Group]:
    """Return groups whose completions are of one length each, log-normal and at most `limit`."""
    chance = np.random.default_rng(seed)
    lengths = np.clip(limit / 4 * np.exp(0.8 * chance.normal(size=prompts)), 2, limit).astype(int)
    return [
        Group(
            f"{seed}.{p}",
            Prompt(f"{seed}.{p}", "", tuple(chance.integers(0, 400, 16).tolist())),
            Sampling(int(length)),
            [Completion(i) for i in range(GROUP)],
        )
        for p, length in enumerate(lengths)
    ]


def requests_of(groups: Sequence[Group]) -> list[Request]:
    """Return the requests of all completions."""
    return [
        Request(f"{g.id}/{c.index}", g.prompt.token_ids, i * GROUP + c.index, g.sampling)
        for i, g in enumerate(groups)
        for c in g.completions
    ]


def in_turns(engine: Any, slots: int, groups: Sequence[Group]) -> None:
    """Draw the groups as a run does."""
    worker = engine.make_worker(Admission(slots // len(engine.engines)))
    worker.start_trace()
    scorer: Any = Unscored()
    controller = RolloutController(worker, scorer, seed=0)
    for _ in controller.run(groups, FullRound(len(groups)), 0):
        pass


def workers_of(engine: Any, slots: int) -> list[RemoteWorker]:
    """Return workers that run ahead, one per engine."""
    workers = [e.make_worker(Admission(slots // len(engine.engines))) for e in engine.engines]
    for worker in workers:
        worker.start_trace()
        worker.start_round(ahead=True)
    return workers


def as_they_come(workers: Sequence[RemoteWorker]) -> Iterator[tuple[RemoteWorker, int]]:
    """Step whichever worker has made a step; yield it with the number of requests that ended."""
    for worker in workers:
        worker.begin()
    while busy := [worker for worker in workers if worker.busy]:
        links: list[Any] = [worker.engine.child.link for worker in busy]
        ready = [w for w, link in zip(busy, links, strict=True) if link.connection.poll(0.0)]
        for worker in ready:
            yield worker, sum(event.finish_reason is not None for event in worker.step())
            worker.begin()
        if not ready:
            time.sleep(1e-4)
    for worker in workers:
        worker.abort()


def free(engine: Any, slots: int, groups: Sequence[Group]) -> None:
    """Draw the groups where `in_turns` draws them, each engine at its own speed."""
    workers, requests = workers_of(engine, slots), requests_of(groups)
    promised = {g.id: 0.0 for g in groups}
    for request in requests:
        promised[request.group] += promised_tokens(request)
    homes = route(promised, [0.0] * len(workers))
    for index, worker in enumerate(workers):
        worker.submit(request for request in requests if homes[request.group] == index)
    for _ in as_they_come(workers):
        pass


def first_come(engine: Any, slots: int, groups: Sequence[Group]) -> None:
    """Give each completion to the engine that has a free slot first."""
    workers, waiting = workers_of(engine, slots), requests_of(groups)
    for index, worker in enumerate(workers):
        worker.submit(waiting[index : slots : len(workers)])
    del waiting[:slots]
    for worker, ended in as_they_come(workers):
        if ended and waiting:
            worker.submit(waiting[:ended])
            del waiting[:ended]


Way = Callable[[Any, int, Sequence[Group]], None]


def compare(
    ways: dict[str, tuple[Any, Way]], slots: int, prompts: int, limit: int, rounds: int
) -> dict[str, list[float]]:
    """Return the tokens per second of each way in each round; they alternate round by round."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        order = list(ways.items())
        order = order[number % len(order) :] + order[: number % len(order)]
        for name, (engine, draw) in order:
            groups = make_groups(prompts, limit, number)
            tokens = GROUP * sum(g.sampling.max_completion_length for g in groups)
            began = time.perf_counter()
            draw(engine, slots, groups)
            if number:  # the first round warms up
                speeds[name].append(tokens / (time.perf_counter() - began))
    return speeds


def show(case: str, speeds: dict[str, list[float]]) -> None:
    """Print and record the median tokens per second of each way, and its ratio to the first."""
    first = next(iter(speeds.values()))
    for name, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(first, values, strict=True))
        speed = statistics.median(values)
        results.add(f"{case}, {name}", {"tokens_per_second": speed, "turns_over_this": ratio})
        print(f"| {case} | {name} | {speed:,.0f} | {min(values):,.0f} | {ratio:.2f} |", flush=True)


def timed_start(name: str, pool: EnginePool, spec: EngineSpec) -> None:
    """Start engines; print the time, and the memory of all processes that this one has started."""
    before, began = resident(), time.perf_counter()
    pool.start(spec)
    seconds, more = time.perf_counter() - began, resident() - before
    print(f"two {name} started in {seconds:.0f} s, {more / 2**20:,.0f} MiB", flush=True)


def resident() -> int:
    """Bytes of memory of the processes below this one; memory that they share counts once."""
    children = psutil.Process().children(recursive=True)
    return sum(child.memory_full_info().pss for child in children)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = results.parser("engines", __doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="engine of the pool")
    parser.add_argument("--shape", default="30M", help="shape of the random model")
    parser.add_argument("--prompts", type=int, default=12, help=f"groups of {GROUP} per round")
    parser.add_argument("--limit", type=int, default=256, help="tokens of the longest completion")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds per way")
    parser.add_argument("--slow", type=float, default=2.0, help="slowdown of the slow engine")
    parser.add_argument("--ray", action="store_true", help="compare with engines in Ray actors")
    options = results.parse(parser, arguments)
    keep_heap()
    os.environ.update(ENVIRONMENT)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        del os.environ[name]  # an engine has a thread for each of its cores
    kind, every = ENGINES[options.engine], options.prompts * GROUP
    few = every // 3 - every // 3 % 2
    sizes = options.prompts, options.limit, options.rounds
    print(f"{len(available_cores())} cores; {every} completions per round\n")
    print("| case | way | tokens/s, median | lowest | `turns` over this, median of rounds |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, options.shape)
        spec = EngineSpec(folder, every, options.limit + 16, (), dtype=torch.float32)
        for case, factor in (("equal", 1.0), ("slow", options.slow)):
            one = ProcessEngine(kind())
            engine = slowed(kind, factor) if factor > 1 else kind()
            two = EnginePool.of(engine, 2)
            actors = EnginePool.of(RayEngine(engine), 2)
            try:
                timed_start("child processes", two, spec)
                ways: dict[str, tuple[Any, Way]] = {"turns": (two, in_turns), "free": (two, free)}
                ways["first come"] = two, first_come
                if factor == 1:
                    one.start(spec)
                    ways["one"] = one, in_turns
                    if options.ray:
                        timed_start("Ray actors", actors, spec)
                        ways["ray"] = actors, in_turns
                for slots in (every, few):
                    show(f"{case}, {slots} slots", compare(ways, slots, *sizes))
            finally:
                two.close()
                one.close()
                actors.close()


if __name__ == "__main__":
    main()
