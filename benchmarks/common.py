"""Setting, prompts and meter that both sides of the comparison share."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_rlsched.data.tasks import Countdown, ReasoningGym
from lit_rlsched.processes import keep_heap
from lit_rlsched.rewards.functions import countdown_reward, math_verify_reward
from lit_rlsched.types import Prompt

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Environment of every measured process: one thread, no network, no GPU."""
TEMPERATURE = 1.0
BETAS = (0.9, 0.95)
WARMUP_STEPS = 5
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides train on."""

    rows: Callable[[Any, int], list[dict[str, Any]]]
    """Makes the rows of a split, `train` or `heldout`, and a size."""
    reward: Callable[..., list[Any]]
    column: str
    """The column that the reward needs."""


CHAT = yaml.safe_load((Path(__file__).parents[1] / "configs/smollm2.yaml").read_text())
"""The recipe of the chat model, which is its task here."""


def _arithmetic(split: str, size: int, instructions: str = "") -> list[dict[str, Any]]:
    chosen = {"split": split, "size": size, "instructions": instructions}
    return ReasoningGym(**CHAT["data"]["train_data"]["init_args"] | chosen).rows()


STEPS = "Explain your reasoning step by step, then give the final answer."
TASKS = {
    "countdown": Task(lambda split, n: Countdown(split, n).rows(), countdown_reward, "metadata"),
    "arithmetic": Task(_arithmetic, math_verify_reward, "answer"),
    "steps": Task(partial(_arithmetic, instructions=STEPS), math_verify_reward, "answer"),
}
"""Countdown is for the model of the repository, sums and products for chat models."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a run; the defaults are those of the quick task.

    Args:
        model: Folder of the initial model.
        task: What to train on.
        learning_rate: Of AdamW.
        rounds: Optimizer steps.
        seed: Of the order and of the noise.
        prompts: Prompts per round.
        generations: Completions per prompt.
        limit: Maximum number of tokens per completion.
        micro_batch_tokens: Positions of our micro-batches.
        engine: Ours.
        trl_backend: TRL's engine, transformers or vLLM.
        trl_batch_size: TRL's `per_device_train_batch_size`.
        train_size: Number of training prompts.
        held_out: Number of held-out prompts; 0 skips the evaluation.
        mask_truncated: Whether completions that are cut teach nothing.
        threads: Threads of the process.
        save_every: Rounds after which the weights are saved for `evaluate`; 0: the last ones.
        callbacks: Ours, with their arguments.
        own_process: Whether our engine has a process and a thread of its own.
    """

    model: str = "examples/countdown/model"
    task: Literal["countdown", "arithmetic", "steps"] = "countdown"
    learning_rate: float = 3e-4
    rounds: int = 20
    seed: int = 0
    prompts: int = 32
    generations: int = 8
    limit: int = 512
    micro_batch_tokens: int = 4096
    engine: Literal["vllm", "transformers"] = "vllm"
    trl_backend: Literal["hf", "vllm"] = "hf"
    trl_batch_size: int = 32
    train_size: int = 4000
    held_out: int = 128
    mask_truncated: bool = False
    threads: int = 1
    save_every: int = 0
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    own_process: bool = False

    @property
    def completions(self) -> int:
        """Completions per round."""
        return self.prompts * self.generations


@dataclass(slots=True)
class Counts:
    """What a run did, as counts."""

    completions: int = 0
    """Completions that were drawn and trained on."""
    skipped: int = 0
    """Of these, completions without a pass, because their advantage is zero."""
    tokens: int = 0
    """Generated tokens."""
    decode_steps: int = 0
    """Forward passes of decoding; with vLLM the steps of the engine, prefill included."""
    decode_rows: int = 0
    """Rows of these passes, including finished rows that wait for the rest of their batch."""
    updates: int = 0
    """Forward and backward passes of the updates."""
    completion_positions: int = 0
    """Completion columns times rows, over all passes of the updates."""
    completion_padding: int = 0
    positions: int = 0
    """The same for whole sequences, prompt and completion."""
    padding: int = 0


@dataclass(slots=True)
class Meter:
    """CPU and wall-clock seconds from the start of the first round to the last optimizer step."""

    counts: Counts = field(default_factory=Counts)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each round."""
    equal: list[float] = field(default_factory=list)
    """Share of the prompts of each round whose completions have the same reward."""
    lengths: list[float] = field(default_factory=list)
    """Mean completion length of each round."""
    laps: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Seconds of each part of each round, and the tokens until then."""
    startup: float | None = None
    _last: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Start the clock; later calls do nothing."""
        if self.startup is None:
            self.startup = time.time() - _process().create_time()
            self._last = cpu_seconds(), time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last call to `part`, which is `rollout` or `update`."""
        now = cpu_seconds(), time.perf_counter()
        lap = {"cpu": now[0] - self._last[0], "wall": now[1] - self._last[1]}
        lap["tokens"] = self.counts.tokens
        self.laps.setdefault(part, []).append(lap)
        self._last = now

    def result(self) -> dict[str, Any]:
        """Return everything for JSON."""
        processes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = sum(resource.getrusage(each).ru_maxrss for each in processes) / 1024
        return asdict(self) | {"peak_mib": peak}


def _process() -> Any:
    import psutil  # installed with TRL

    return psutil.Process()


def cpu_seconds() -> float:
    """Return the CPU time of this process and all its children, running reward workers included."""
    children = [sum(child.cpu_times()[:4]) for child in _process().children(recursive=True)]
    return time.process_time() + sum(os.times()[2:4]) + sum(children)


def save(model: Any, folder: Path, setting: Setting, rounds: int) -> None:
    """Save the weights after some rounds, or after the last one, beside or in the folder."""
    if setting.save_every:
        folder = folder.with_name(str(rounds))
    if rounds == setting.rounds or (setting.save_every and rounds % setting.save_every == 0):
        model.save_pretrained(folder / "model")


def training_rows(setting: Setting) -> list[dict[str, Any]]:
    """Return the rows from which both sides draw their prompts."""
    return TASKS[setting.task].rows("train", setting.train_size)


def rounds_of_prompts(
    rows: list[dict[str, Any]], tokenizer: Any, setting: Setting
) -> list[list[Prompt]]:
    """Return the prompts of each round in the order of `RolloutDataModule`."""
    from lit_rlsched.data.prompts import make_prompts
    from lit_rlsched.data.source import PromptSource

    prompts = make_prompts(rows, tokenizer, max_prompt_length=sys.maxsize)
    source = PromptSource(prompts, setting.seed)
    return [[d.prompt for d in source.draw(setting.prompts)] for _ in range(setting.rounds)]


def run_module(module: str, *arguments: str, name: str, threads: int = 1, kv_gib: int = 1) -> None:
    """Run a module of the benchmarks in a new process; `name` is what messages call it.

    Raises:
        RuntimeError: the process failed. The message has the end of its output.
    """
    environment = ENVIRONMENT | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        env=os.environ | environment | {"VLLM_CPU_KVCACHE_SPACE": str(kv_gib)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"`{name}` failed with exit code {done.returncode}:\n{done.stdout[-4000:]}"
        )


def run_side(train: Callable[[Setting, Path], Any]) -> None:
    """Run one side in this process: `argv` has the setting and the folder for the result."""
    import torch

    keep_heap()
    setting, folder = Setting(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(setting.threads)
    result = train(setting, folder)
    (folder / "result.json").write_text(json.dumps(result))
