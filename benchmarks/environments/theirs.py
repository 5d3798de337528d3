"""TRL's side, in a process of its own: kind of tools, the seconds of a call and a file."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import common
from benchmarks.environments.ours import ROUNDS
from benchmarks.environments.slow import (
    GENERATIONS,
    LIMIT,
    MODEL,
    PROMPTS,
    environment,
    rows,
)
from benchmarks.theirs import adapt_vllm, make_config
from examples.lookup.lookup import right
from lit_rlsched.processes import keep_heap

CASES = {"TRL, sync tools": False, "TRL, async tools": True}


def run(case: str, median: float) -> dict[str, float]:
    """Train some rounds and return the means over those that are measured."""
    from datasets import Dataset
    from trl import GRPOTrainer

    keep_heap()
    torch.set_num_threads(1)
    counts = common.Counts()
    adapt_vllm(counts)
    rounds: list[dict[str, float]] = []
    last = [0.0]

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began, steps = time.perf_counter(), counts.decode_steps
            output = super()._generate_and_score_completions(inputs)
            drawn = {"rollout": time.perf_counter() - began}
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            drawn |= {"tokens": int(mask.sum()), "decode_steps": counts.decode_steps - steps}
            rounds.append(drawn)
            return output

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            last[0] = last[0] or time.perf_counter()
            output = super().training_step(*args, **kwargs)  # type: ignore[no-untyped-call]
            now = time.perf_counter()
            rounds[-1]["seconds"] = rounds[-1].get("seconds", 0.0) + now - last[0]
            last[0] = now
            return output

    setting = common.Setting(
        model=MODEL,
        prompts=PROMPTS,
        generations=GENERATIONS,
        limit=LIMIT,
        rounds=ROUNDS,
        learning_rate=1e-6,
        trl_backend="vllm",
        trl_batch_size=32,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(setting, Path(folder), 32)
        trainer = Timed(
            model=MODEL,
            reward_funcs=[right],
            args=config,
            train_dataset=Dataset.from_list(rows(ROUNDS)),
            processing_class=tokenizer,
            environment_factory=environment(median, waits=CASES[case]),
        )
        trainer.train()
    frequency = "tools/call_frequency"
    means = {name: fmean(each[name] for each in rounds[1:]) for name in rounds[0]}
    return means | {"call_frequency": trainer.state.log_history[-1].get(frequency, 0.0)}


if __name__ == "__main__":
    name, median, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(name, float(median))))
    os._exit(0)  # TRL never closes vLLM's engine, which would print an error
