"""Seconds on real vLLM: schedules in turn on the same prompts, then what scheduling itself costs.

    python -m lit_rlsched.benchmark.speed

Every schedule draws the same completions (seeds do not depend on the schedule) with the policy that
the quick task ends with; runs are interleaved, and the predictor learns in rounds of its own before
the clock starts.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_rlsched.benchmark.common import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlsched._malloc import keep_heap
from lit_rlsched.benchmark.record import record
from lit_rlsched.benchmark.replay import Schedule, Unscored
from lit_rlsched.data.tasks import Countdown
from lit_rlsched.engines.base import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.types import Completion, Event, Group, Prompt, Sampling
from lit_rlsched.rollout.worker import RolloutWorker
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.calibration import CalibratedPredictor
from lit_rlsched.scheduling.lengths import TokenConditioned
from lit_rlsched.scheduling.planning import lower_bound, makespan, plan_makespan
from lit_rlsched.scheduling.rounds import FullRound

PROBE_TOKENS = 16


def learned(lengths: dict[str, int]) -> TokenConditioned:
    """The predictor of `LengthPrediction`."""
    return TokenConditioned()


SCHEDULES = [
    Schedule("naive rounds", "rounds"),
    Schedule("continuous, fifo"),
    Schedule("continuous, longest first", "continuous", "longest_first", learned, PROBE_TOKENS),
    Schedule("continuous, planned", "continuous", "planned", learned, PROBE_TOKENS),
]


def prompts_of(model: str) -> Iterator[list[Prompt]]:
    """The quick task's prompts, 32 at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = Countdown("train", 4000).rows()
    for start in range(0, len(rows) - 32, 32):
        yield [
            Prompt(str(start + i), row["prompt"], tuple(tokenizer(row["prompt"])["input_ids"]))
            for i, row in enumerate(rows[start : start + 32])
        ]


class Clocked:
    """A schedule with its own controller on the shared engine."""

    def __init__(
        self, engine: VLLMEngine, policy: torch.nn.Module, schedule: Schedule, slots: int
    ) -> None:
        self.name, self.policy = schedule.name, policy
        self.worker = RolloutWorker(engine, Admission(slots, schedule.refill, schedule.order))
        self.controller = RolloutController(
            self.worker,
            Unscored(),  # type: ignore[arg-type]
            seed=0,
            lengths=CalibratedPredictor(schedule.predictor({})) if schedule.predictor else None,
            probe_tokens=schedule.probe_tokens,
        )
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.steps = self.tokens = self.prefill_tokens = 0

    def run(self, prompts: Sequence[Prompt], version: int, measure: bool) -> dict[str, list[int]]:
        """Draw a round; the tokens of each completion."""
        self.worker.engine.sync_weights(
            self.policy.named_parameters(), version
        )  # empties its cache
        plan = [Group(p.uid, p, Sampling(512), [Completion(i) for i in range(8)]) for p in prompts]
        trace = self.worker.start_trace()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in self.controller.run(plan, FullRound(len(plan)), version, predict=True):
            pass
        if measure:
            self.seconds.append(time.perf_counter() - start)
            self.cpu_seconds.append(time.process_time() - cpu)
            self.steps += trace.decode_steps
            self.tokens += trace.tokens
            self.prefill_tokens += trace.total("prefill_tokens")
        return {f"{g.id}/{c.index}": c.token_ids for g in plan for c in g.completions}


def wall_clock(model: str, slots: int, warm_up: int, rounds: int) -> None:
    """Schedules in turn, round by round."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = VLLMEngine()
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    engine.start(EngineSpec(model, slots, 1024, (eos,), policy=policy))
    clocked = [Clocked(engine, policy, schedule, slots) for schedule in SCHEDULES]
    for number, prompts in zip(range(warm_up + rounds), prompts_of(model), strict=False):
        turn = number % len(clocked)
        order = clocked[turn:] + clocked[:turn]
        drawn = [c.run(prompts, number, number >= warm_up) for c in order]
        assert all(d == drawn[0] for d in drawn), "a schedule changed a completion"
    engine.close()
    naive = clocked[0]
    print(f"{rounds} rounds of 256 completions, {slots} slots, {naive.tokens:,} tokens each way\n")
    print(
        "| schedule | decode steps | prompt tokens computed | CPU seconds | seconds | tokens/s | "
        "against naive rounds, total (median of rounds) |"
    )
    print("|---|---|---|---|---|---|---|")
    for c in clocked:
        ratios = [a / b for a, b in zip(naive.seconds, c.seconds, strict=True)]
        print(
            f"| {c.name} | {c.steps:,} | {c.prefill_tokens:,} | {sum(c.cpu_seconds):.1f} | "
            f"{sum(c.seconds):.1f} | {c.tokens / sum(c.seconds):,.0f} | "
            f"{sum(naive.seconds) / sum(c.seconds):.2f}x ({statistics.median(ratios):.2f}x) |"
        )


class Timed(VLLMEngine):
    """Says how much of the time is the engine's."""

    inside = 0.0

    def step(self) -> list[Event]:
        start = time.perf_counter()
        try:
            return super().step()
        finally:
            self.inside += time.perf_counter() - start

    def submit(self, requests: Sequence[Any]) -> None:
        start = time.perf_counter()
        super().submit(requests)
        self.inside += time.perf_counter() - start


def overhead(model: str, running: int) -> None:
    """What admission, trace and controller take of a decode step with all slots full."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = Timed()
    engine.start(EngineSpec(model, running, 512, (), policy=policy))  # no EOS: all run to the limit
    schedule = SCHEDULES[-1]
    clocked = Clocked(engine, policy, schedule, running)
    prompts = next(prompts_of(model))
    shares, ours, theirs = [], 0.0, 0.0
    for version in range(5):
        engine.sync_weights(policy.named_parameters(), version)
        plan = [
            Group(f"{p.uid}.{version}", p, Sampling(200), [Completion(i) for i in range(16)])
            for p in prompts
        ]
        trace = clocked.worker.start_trace()
        engine.inside, start = 0.0, time.perf_counter()
        for _ in clocked.controller.run(plan, FullRound(len(plan)), version, predict=True):
            pass
        total = time.perf_counter() - start
        assert statistics.fmean(trace.steps["running"]) > 0.95 * running
        if version:  # the first warms up
            shares.append((total - engine.inside) / engine.inside)
            ours += (total - engine.inside) / trace.decode_steps / 4
            theirs += engine.inside / trace.decode_steps / 4
    engine.close()
    print(
        f"\nScheduling takes {ours * 1e6:.0f} us of a decode step of {theirs * 1e3:.2f} ms with "
        f"{running} running ({statistics.median(shares):.1%}; '{schedule.name}', the quick task's "
        "model of 0.45 M parameters, the cheapest step there is)"
    )


def planner() -> None:
    """Seconds to plan, and how far from the lower bound."""
    rng = np.random.default_rng(0)
    print("\n| completions | slots | seconds to plan | over the lower bound |\n|---|---|---|---|")
    for count, slots in ((32, 8), (256, 32), (1024, 128), (10_000, 64), (10_000, 256)):
        lengths = np.minimum(8192, 1200 * np.exp(1.1 * rng.normal(size=count))).astype(int).tolist()
        start = time.perf_counter()
        plan = plan_makespan(lengths, slots, 0.1)
        seconds = time.perf_counter() - start
        worse = makespan(plan, lengths) / lower_bound(lengths, slots) - 1
        print(f"| {count:,} | {slots} | {seconds:.3f} | +{worse:.2%} |")


def main() -> None:
    """Print all three."""
    parser = argparse.ArgumentParser(
        "python -m lit_rlsched.benchmark.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recording", default="runs/recording", help="made if missing")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=8, help="rounds before the clock starts")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds of each schedule")
    options = parser.parse_args()
    if not Path(options.recording).exists():
        record(options.recording)
    keep_heap()
    model = f"{options.recording}/model"
    wall_clock(model, options.slots, options.warm_up, options.rounds)
    overhead(model, 256)
    planner()


if __name__ == "__main__":
    main()
