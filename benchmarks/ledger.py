"""Estimates of `lit-rlsched estimate` compared with the memory of real runs on the CPU.

    python -m benchmarks run ledger

Each case trains a random model for two rounds in a new process. Weights, gradients, optimizer
state and cache are the bytes of the actual tensors. `step` is counted by `LiveBytes` over a whole
optimizer step. The last two columns are the peak resident memory of the process in the rollout and
in the update of the second round, minus the memory before the model was loaded. glibc is set to
return every freed block of 64 KiB or more, so that resident memory follows the live tensors.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import models, results
from benchmarks.common import ENVIRONMENT

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SHAPES = {  # layers, hidden size, query heads, key-value heads, vocabulary
    "1M": (2, 128, 2, 1, 512),
    "10M": (6, 320, 5, 1, 8192),
    "30M": (8, 512, 8, 2, 8192),
    "60M": (10, 640, 10, 2, 16384),
}
CASES: dict[str, dict[str, Any]] = {
    "10M": {"shape": "10M"},
    "30M": {"shape": "30M"},
    "60M": {"shape": "60M"},
    "30M, 4,096 positions": {"shape": "30M", "micro_batch_tokens": 4096, "prompts": 16},
    "30M, gradient checkpointing": {"shape": "30M", "gradient_checkpointing": True},
    "30M, LoRA": {"shape": "30M", "lora_rank": 16},
    "30M, bf16-true": {"shape": "30M", "precision": "bf16-true"},
    "30M, beta": {"shape": "30M", "beta": 0.1},
    "10M, vLLM": {"shape": "10M", "engine": "VLLMEngine"},
    "60M, vLLM, 8 slots": {"shape": "60M", "engine": "VLLMEngine", "slots": 8},
}


def make_model(folder: str, shape: str) -> None:
    """Make a random model of this shape with Qwen3's architecture."""
    layers, hidden, heads, kv_heads, vocabulary = SHAPES[shape]
    models.make_model(
        folder,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
    )


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward that differs within every group, so that no completion has a zero advantage."""
    return [float(sum(ids) % 101) for ids in completion_ids]


def run_of(model: str, tokenizer: str, case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Make the Trainer, module and data module of a case."""
    from lightning import Trainer

    from lit_rlsched import GRPOModule, RolloutDataModule, engines
    from lit_rlsched.callbacks import MicroGroupSampling
    from lit_rlsched.data.tasks import Countdown

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        precision=case.get("precision", "32-true"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[MicroGroupSampling(slots=case["slots"])] if "slots" in case else [],
    )
    names = ("gradient_checkpointing", "lora_rank", "beta")
    module = GRPOModule(model, **{name: case[name] for name in names if name in case})
    data = RolloutDataModule(
        Countdown("train", size=64),
        [spread],
        tokenizer=tokenizer,
        engine=getattr(engines, case.get("engine", "TransformersEngine"))(),
        prompts_per_round=case.get("prompts", 4),
        num_generations=8,
        micro_batch_tokens=case.get("micro_batch_tokens", 2048),
        max_completion_length=128,
    )
    return trainer, module, data


def estimated(model: str, tokenizer: str, case: dict[str, Any]) -> dict[str, int]:
    """Return the ledger's estimates."""
    from lit_rlsched.cli.estimate import Ledger, PlannedRun

    ledger = Ledger(PlannedRun(*run_of(model, tokenizer, case)), 2**40)
    items = {item.name: item for item in ledger.items()}
    rollout, update = ledger.peak()
    passes = items["activations"].update + items["passes at their peak"].update
    return {
        "weights": items["weights"].rollout,
        "gradients": items["gradients"].update,
        "optimizer state": items["optimizer state"].rollout,
        "key-value cache": items["key-value cache"].rollout,
        "step": items["gradients"].update + passes,
        "rollout, resident": rollout,
        "update, resident": update,
    }


def measured(model: str, tokenizer: str, case: dict[str, Any]) -> dict[str, int]:
    """Train, and return what the second round held."""
    from lightning import Callback

    from lit_rlsched.cli.estimate import LiveBytes, storage_bytes
    from lit_rlsched.text import kv_bytes_per_token

    if "engine" in case:
        from lit_rlsched.engines import _vllm_guest

        _vllm_guest.import_vllm()
    # loads modules that are imported late, such as the optimizer's compiler
    warm, module, data = run_of(str(Path(model).with_name("1M")), tokenizer, {"prompts": 2})
    warm.fit(module, datamodule=data)
    del warm, module, data
    gc.collect()
    before = resident()
    figures: dict[str, int] = {}
    trainer, module, data = run_of(model, tokenizer, case)
    engine: Any = data.run.settings.engine

    def cache_bytes() -> int:
        if "engine" in case:  # one block is reserved by the engine
            dtype = engine.cache_dtype(data.run.session.spec)
            token = kv_bytes_per_token(module.model.config, dtype)
            return (engine.kv_capacity + engine.kv_block) * token
        return storage_bytes(t for pair in engine._cache._layers.values() for t in pair)

    class Measure(Callback):
        def on_round_start(self, *_: Any) -> None:
            reset_peak()

        def on_before_optimizer_step(self, *_: Any) -> None:
            figures["gradients"] = storage_bytes(
                p.grad for p in module.parameters() if p.grad is not None
            )

        def on_completion_end(self, *_: Any) -> None:
            figures["key-value cache"] = max(figures.get("key-value cache", 0), cache_bytes())

        def on_round_end(self, *_: Any) -> None:
            figures["rollout, resident"] = resident("VmHWM") - before
            reset_peak()

        def on_train_batch_start(self, *_: Any) -> None:
            self.live = LiveBytes()
            self.live.__enter__()

        def on_train_batch_end(self, *_: Any) -> None:
            self.live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            figures["step"] = self.live.peak
            figures["update, resident"] = resident("VmHWM") - before

    trainer.callbacks.append(Measure())
    trainer.fit(module, datamodule=data)
    figures["weights"] = storage_bytes(module.parameters())
    (optimizer,) = trainer.optimizers
    state = [t for held in optimizer.state.values() for t in held.values()]
    figures["optimizer state"] = storage_bytes(state)
    return figures


def resident(field: str = "VmRSS") -> int:
    """Return this process's resident memory in bytes; `VmHWM` is its peak since `reset_peak`."""
    (value,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(value) * 1024


def reset_peak() -> None:
    """Reset the peak of resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def _in_process(side: Callable[..., Any], *args: Any) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.ledger",
        "--one",
        json.dumps([side.__name__, *args]),
    ]
    env = os.environ | ENVIRONMENT | MALLOC
    del env["VLLM_CPU_KVCACHE_SPACE"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = results.parser("ledger", __doc__)
    results.add_cases(parser, CASES)
    parser.add_argument(
        "--tokenizer", default="examples/countdown/model", help="folder of the tokenizer"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = results.parse(parser, arguments)
    if options.one:
        side, *args = json.loads(options.one)
        print(json.dumps({"estimated": estimated, "measured": measured}[side](*args)))
        return
    print("| MiB: estimate / measured = ratio |", " | ".join(_NAMES), "|")
    print("|---" * (len(_NAMES) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for shape in {"1M", *(CASES[name]["shape"] for name in options.cases)}:
            make_model(f"{folder}/{shape}", shape)
        for name in options.cases:
            args = (f"{folder}/{CASES[name]['shape']}", options.tokenizer, CASES[name])
            ours, theirs = _in_process(estimated, *args), _in_process(measured, *args)
            results.add(name, {f"{n}, estimated": ours[n] for n in _NAMES})
            results.add(name, {f"{n}, measured": theirs[n] for n in _NAMES})
            cells = [
                f"{ours[n] / 2**20:.1f} / {theirs[n] / 2**20:.1f} = {ours[n] / theirs[n]:.2f}"
                for n in _NAMES
            ]
            print(f"| {name} |", " | ".join(cells), "|", flush=True)


_NAMES = (
    "weights",
    "gradients",
    "optimizer state",
    "key-value cache",
    "step",
    "rollout, resident",
    "update, resident",
)


if __name__ == "__main__":
    main()
