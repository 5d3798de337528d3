"""Seconds with vLLM: schedules on the same prompts, and the cost of scheduling itself.

    python -m benchmarks run speed

Every schedule draws the same completions (seeds do not depend on the schedule) with the final
policy of the quick task. Schedules alternate round by round. The predictor learns in earlier
rounds, which are not timed.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import results
from benchmarks.models import make_model
from benchmarks.record import read_recording, record
from benchmarks.replay import Schedule
from lit_rlsched.cli.malloc import keep_heap
from lit_rlsched.engines.rollout_worker import RolloutWorker
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.length_prediction import CalibratedPredictor
from lit_rlsched.scheduling.planning import lower_bound, makespan, plan_makespan
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.types import Completion, Event, Group, Prompt, Sample, Sampling

PROBE = 16
"""Tokens that are drawn before lengths are predicted."""


def prompts_of(recording: str) -> list[list[Prompt]]:
    """Return the prompts of each recorded round."""
    return [[group.prompt for group in groups] for groups in read_recording(recording)]


def learned(lengths: dict[str, int]) -> TokenConditioned:
    """Return the predictor of `LengthPrediction`."""
    return TokenConditioned()


SCHEDULES = [
    Schedule("naive rounds", "rounds"),
    Schedule("continuous, fifo"),
    Schedule("continuous, longest first", "continuous", "longest_first", learned),
    Schedule("continuous, longest first, probe", "continuous", "longest_first", learned, PROBE),
    Schedule("continuous, planned, probe", "continuous", "planned", learned, PROBE),
]


class Clocked:
    """A schedule with its own controller on the shared engine."""

    def __init__(
        self, engine: VLLMEngine, policy: torch.nn.Module, schedule: Schedule, slots: int
    ) -> None:
        self.name, self.policy = schedule.name, policy
        self.engine = engine
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
        """Draw a round and return the tokens of each completion."""
        # empties the engine's cache
        self.engine.sync_weights(self.policy.named_parameters(), version)
        plan = [Group(p.uid, p, Sampling(512), [Completion(i) for i in range(8)]) for p in prompts]
        trace = self.worker.start_trace()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in self.controller.run(plan, FullRound(len(plan)), version, predict=True):
            pass
        if self.controller.lengths is not None:
            self.controller.lengths.end_round()
        if measure:
            self.seconds.append(time.perf_counter() - start)
            self.cpu_seconds.append(time.process_time() - cpu)
            self.steps += trace.decode_steps
            self.tokens += trace.tokens
            self.prefill_tokens += trace.total("prefill_tokens")
        return {Sample(g, c).id: list(c.token_ids) for g in plan for c in g.completions}


def wall_clock(recording: str, slots: int, warm_up: int, rounds: int) -> None:
    """Time the schedules, which alternate round by round."""
    model, prompts = f"{recording}/model", prompts_of(recording)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = VLLMEngine()
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    engine.start(EngineSpec(model, slots, 1024, (eos,), policy=policy))
    clocked = [Clocked(engine, policy, schedule, slots) for schedule in SCHEDULES]
    for number in range(warm_up + rounds):
        turn = number % len(clocked)
        order = clocked[turn:] + clocked[:turn]
        drawn = [c.run(prompts[number], number, number >= warm_up) for c in order]
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
        results.add(
            c.name,
            {
                "decode_steps": c.steps,
                "prefill_tokens": c.prefill_tokens,
                "tokens": c.tokens,
                "cpu_seconds": sum(c.cpu_seconds),
                "seconds": sum(c.seconds),
            },
        )
        ratios = [a / b for a, b in zip(naive.seconds, c.seconds, strict=True)]
        print(
            f"| {c.name} | {c.steps:,} | {c.prefill_tokens:,} | {sum(c.cpu_seconds):.1f} | "
            f"{sum(c.seconds):.1f} | {c.tokens / sum(c.seconds):,.0f} | "
            f"{sum(naive.seconds) / sum(c.seconds):.2f}x ({statistics.median(ratios):.2f}x) |"
        )


class Timed(VLLMEngine):
    """Measure how much of the time is the engine's."""

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


def larger_model(folder: str) -> None:
    """Make a random model with 11 M parameters, far smaller than models that people train."""
    make_model(
        folder,
        vocab_size=512,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )


def overhead(model: str, prompts: Sequence[Prompt], running: int, limit: int) -> None:
    """Measure how much of a decode step the schedules take with all slots full."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = Timed()
    engine.start(
        EngineSpec(model, running, 512, (), policy=policy)
    )  # without EOS, so that all reach the limit
    clocked = [Clocked(engine, policy, schedule, running) for schedule in SCHEDULES]
    ours: dict[str, list[float]] = {c.name: [] for c in clocked}
    theirs = []
    for version in range(5):
        for c in clocked:
            engine.sync_weights(policy.named_parameters(), version)
            plan = [
                Group(f"{p.uid}.{version}", p, Sampling(limit), [Completion(i) for i in range(16)])
                for p in prompts
            ]
            trace = c.worker.start_trace()
            engine.inside, start = 0.0, time.perf_counter()
            for _ in c.controller.run(plan, FullRound(len(plan)), version, predict=True):
                pass
            if c.controller.lengths is not None:
                c.controller.lengths.end_round()
            total = time.perf_counter() - start
            assert statistics.fmean(trace.steps["running"]) > 0.9 * running
            if version:  # the first round warms up
                ours[c.name].append((total - engine.inside) / trace.decode_steps)
                theirs.append(engine.inside / trace.decode_steps)
    engine.close()
    step = statistics.median(theirs)
    print(
        f"\n{running} running, a decode step of {step * 1e3:.1f} ms with "
        f"{policy.num_parameters() / 1e6:.2g} M parameters\n\n"
        "| schedule | scheduling a step, us | of the step |\n|---|---|---|"
    )
    for name, seconds in ours.items():
        own = statistics.median(seconds)
        case = f"{name}, {running} running, {policy.num_parameters()} parameters"
        results.add(case, {"scheduling_seconds": own, "step_seconds": step})
        print(f"| {name} | {own * 1e6:.0f} | {own / step:.1%} |")


def planner() -> None:
    """Measure the seconds of planning, and how far a plan is from the lower bound."""
    rng = np.random.default_rng(0)
    print("\n| completions | slots | seconds to plan | over the lower bound |\n|---|---|---|---|")
    for count, slots in ((32, 8), (256, 32), (1024, 128), (10_000, 64), (10_000, 256)):
        lengths = np.minimum(8192, 1200 * np.exp(1.1 * rng.normal(size=count))).astype(int).tolist()
        start = time.perf_counter()
        plan = plan_makespan(lengths, slots, 0.1)
        seconds = time.perf_counter() - start
        worse = makespan(plan, lengths) / lower_bound(lengths, slots) - 1
        figures = {"planning_seconds": seconds, "over_lower_bound": worse}
        results.add(f"plan of {count} in {slots} slots", figures)
        print(f"| {count:,} | {slots} | {seconds:.3f} | +{worse:.2%} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all three tables."""
    parser = results.parser("speed", __doc__)
    parser.add_argument(
        "--recording", default="runs/recording", help="folder of the recording; made if missing"
    )
    parser.add_argument("--slots", type=int, default=32, help="number of slots")
    parser.add_argument("--warm-up", type=int, default=8, help="rounds before the timed ones")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds per schedule")
    options = results.parse(parser, arguments)
    if not Path(options.recording).exists():
        record(options.recording)
    keep_heap()
    wall_clock(options.recording, options.slots, options.warm_up, options.rounds)
    prompts = prompts_of(options.recording)[0]
    overhead(f"{options.recording}/model", prompts, running=256, limit=200)
    with tempfile.TemporaryDirectory() as folder:
        larger_model(folder)
        overhead(folder, prompts, running=256, limit=50)
    planner()


if __name__ == "__main__":
    main()
