"""Cost of a decode step with vLLM beside the model: bytecode instructions and CPU seconds.

    python -m benchmarks run host

Draws plain rounds with all slots full and a model so small that its time does not matter. What
remains is the host's work per running request, for which a GPU has to wait. Bytecode instructions
are exact and the same on every machine; CPU seconds include NumPy, torch and the kernel. Each part
is counted without the other parts that it calls.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from benchmarks.common import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import torch
from transformers import AutoModelForCausalLM

from benchmarks import models, results
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.vllm import VLLMEngine
from lit_rlsched.processes import keep_heap
from lit_rlsched.rollout.rollout import Rollout
from lit_rlsched.rollout.scoring import Unscored
from lit_rlsched.rollout.session import RolloutSession
from lit_rlsched.types import Completion, Group, Prompt, Sampling

GROUP = 16
"""Completions per prompt."""
SKIPPED = 2
"""Steps at the start of a round that are not counted because they prefill."""
LOOP, ENGINE = "our loop", "our engine"
PARTS = (
    LOOP,
    ENGINE,
    "vLLM: schedule",
    "vLLM: inputs",
    "vLLM: model",
    "vLLM: draw",
    "vLLM: tokens in",
    "vLLM: outputs",
    "vLLM: rest",
)


def make_model(folder: str) -> None:
    """Make a random model with one layer."""
    models.make_model(
        folder,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )


class Rounds:
    """Plain rounds with all slots full on an engine, which the caller closes."""

    def __init__(self, model: str, running: int, limit: int) -> None:
        self.limit, self.running = limit, running
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.engine, self.steps, self.begun = VLLMEngine(), 0, lambda: None
        spec = EngineSpec(model, running, limit + 8, ())  # without EOS, so that all reach the limit
        scorer: Any = Unscored()
        self.session = RolloutSession(self.engine, spec, scorer, self._sync, seed=0)
        self.session.check_interrupt = self._step

    def _sync(self, version: int) -> dict[str, float]:
        self.engine.sync_weights(self.policy.named_parameters(), version)
        return {}

    def _step(self) -> None:
        self.steps += 1
        if self.steps == SKIPPED + 1:
            self.begun()  # type: ignore[no-untyped-call]

    def run(self, version: int, begun: Callable[[], None]) -> int:
        """Draw a round and return its decode steps after `begun` was called: when all decode."""
        prompts = [Prompt(f"{i}", "", (1 + i % 60, 2, 3)) for i in range(self.running // GROUP)]
        plan = [
            Group(p.uid, p, Sampling(self.limit), [Completion(i) for i in range(GROUP)])
            for p in prompts
        ]
        self.steps, self.begun = 0, begun
        rollout = Rollout(self.session, plan, version)
        rollout.load_weights()
        rollout.run()
        assert set(rollout.trace.steps["running"]) == {self.running}
        return rollout.trace.decode_steps - SKIPPED


class Parts:
    """CPU seconds and bytecode instructions of the parts of a step.

    Args:
        engine: Engine that has started; its functions are wrapped.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.instructions: Counter[str] = Counter()
        self._stack = [LOOP]
        self._since = time.process_time()
        live: Any = engine._live
        core = live.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._wrap(engine, "step", ENGINE)
        self._wrap(engine, "stats", ENGINE)
        self._wrap(live.engine_core, "get_output", "vLLM: rest")
        self._wrap(core.scheduler, "schedule", "vLLM: schedule")
        self._wrap(core.model_executor, "execute_model", "vLLM: inputs")
        self._wrap(runner, "_model_forward", "vLLM: model")
        self._wrap(runner.model, "compute_logits", "vLLM: model")
        self._wrap(core.model_executor, "sample_tokens", "vLLM: draw")
        self._wrap(core.scheduler, "update_from_output", "vLLM: tokens in")
        self._wrap(live.output_processor, "process_outputs", "vLLM: outputs")

    def forget(self) -> None:
        """Reset all figures."""
        self.seconds.clear()
        self.instructions.clear()
        self._since = time.process_time()

    def count_time(self) -> None:
        """Add the time since the last call to the current part."""
        now = time.process_time()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        whole = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.count_time()
            self._stack.append(part)
            try:
                return whole(*args, **kwargs)
            finally:
                self.count_time()
                self._stack.pop()

        setattr(owner, name, timed)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the instructions of everything that is called in this block."""

        def count(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_code.co_filename == __file__:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                self.instructions[self._stack[-1]] += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            yield
        finally:
            sys.settrace(before)


def measure(
    model: str, running: int, limit: int, rounds: int, count: bool = False
) -> dict[str, float]:
    """Return CPU seconds, or bytecode instructions, of a step by part: the median of the rounds.

    A first round, which is not counted, warms up.
    """
    of = Rounds(model, running, limit)
    parts = Parts(of.engine)
    of.run(0, parts.forget)
    measured = []
    for version in range(1, rounds + 1):
        with parts.counting() if count else nullcontext():
            steps = of.run(version, parts.forget)
            parts.count_time()
        counted: Mapping[str, float] = parts.instructions if count else parts.seconds
        measured.append({part: counted.get(part, 0.0) / steps for part in PARTS})
    of.engine.close()
    return {part: statistics.median(m[part] for m in measured) for part in PARTS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = results.parser("host", __doc__)
    parser.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=[256, 512, 1024],
        help="numbers of running requests",
    )
    parser.add_argument("--steps", type=int, default=100, help="decode steps per measured round")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    parser.add_argument(
        "--count-only", action="store_true", help="count instructions, measure no time"
    )
    options = results.parse(parser, arguments)
    keep_heap()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        counted = {n: measure(folder, n, 12, 1, count=True) for n in options.running}
        for n, c in counted.items():
            results.add(f"{n} running, instructions of a step", c)
        print("Bytecode instructions of a step for each running request\n")
        table(counted, lambda instructions, n: f"{instructions / n:,.1f}")
        if options.count_only:
            return
        limit = options.steps + SKIPPED
        timed = {n: measure(folder, n, limit, options.rounds) for n in options.running}
        for n, s in timed.items():
            results.add(f"{n} running, CPU seconds of a step", s)
        print("\nCPU microseconds of a step\n")
        table(timed, lambda seconds, n: f"{seconds * 1e6:,.0f}")


def table(measured: dict[int, dict[str, float]], shown: Callable[[float, int], str]) -> None:
    """Print a row for each part, and the ratio of our parts to vLLM's."""
    print("| | " + " | ".join(f"{n:,} running" for n in measured) + " |")
    print("|---|" + "---|" * len(measured))
    for part in PARTS:
        cells = (shown(of[part], n) for n, of in measured.items())
        print(f"| {part} | {' | '.join(cells)} |")
    shares = (f"{(of[LOOP] + of[ENGINE]) / theirs(of):.1%}" for of in measured.values())
    print(f"| ours over vLLM's | {' | '.join(shares)} |", flush=True)


def theirs(measured: Mapping[str, float]) -> float:
    """Return the sum of vLLM's parts."""
    return sum(figure for part, figure in measured.items() if part not in (LOOP, ENGINE))


if __name__ == "__main__":
    main()
