"""What a decode step costs beside the engine: counted in bytecode instructions, not timed."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from lit_rlsched.engines.rollout_worker import RolloutWorker
from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.rewards.jobs import Job, scored
from lit_rlsched.rollout.controller import RolloutController
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.scheduling.admission import Admission
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.types import Completion, Group, Prompt, Sampling
from lit_rlsched.workers.pool import Result, parse_message

OURS = (
    "rollout/controller.py",
    "engines/rollout_worker.py",
    "scheduling/trace.py",
    "types.py",
    "rollout/scoring.py",
    "scheduling/admission.py",
    "scheduling/admission.py",
    "<string>",
)
"""`<string>`: what dataclasses generate."""


def counted(function: Callable[[], None]) -> Counter[str]:
    """Bytecode instructions of a call, by source file."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts[frame.f_code.co_filename] += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return counts


def instructions(prompts: int, generations: int, tokens: int) -> float:
    """Of the loop, for each token drawn; all completions are of the same length."""
    engine = SimulatedEngine(lengths=lambda request: tokens, max_jump=1)
    slots = prompts * generations
    engine.start(EngineSpec("", slots=slots, max_model_len=1 + tokens, eos_token_ids=(0,)))
    controller = RolloutController(
        RolloutWorker(engine, Admission(slots)),
        Unscored(),
        seed=0,  # type: ignore[arg-type]
    )
    groups = [
        Group(
            str(p),
            Prompt(str(p), "", (1,)),
            Sampling(tokens),
            [Completion(i) for i in range(generations)],
        )
        for p in range(prompts)
    ]
    controller.worker.start_trace()

    def run() -> None:
        for _ in controller.run(groups, FullRound(prompts), 0):
            pass

    counts = counted(run)
    ours = sum(n for file, n in counts.items() if file.endswith(OURS))
    return ours / (slots * tokens)


python_311 = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="other versions count otherwise"
)


@python_311
def test_a_token_costs_few_instructions() -> None:
    # it was 180 before it was looked at; includes those of `Unscored`
    assert instructions(8, 8, 50) < 157


@python_311
def test_a_score_costs_few_instructions() -> None:
    job = Job(7, "group/3", b"", 1.0, [None])
    message = json.dumps(["score", 7, 0, 1.5, 0.001, 1.0, None, {}, {}]).encode()

    def take() -> None:
        _, (_, index, _, *result) = parse_message(message)
        job.results[index] = Result.received(*result)
        assert job.complete and scored(job).scores == [1.0]

    # 63 are this test's; it was 590 when all that comes from a worker was first checked
    assert counted(take).total() < 400
