"""The report that `lit-rlsched estimate` prints."""

import os
import re
from pathlib import Path

import torch

from lit_rlsched.estimate.ledger import MOST_GENERATIONS, Item, Ledger
from lit_rlsched.estimate.run import Device
from lit_rlsched.sizes import format_bytes, parse_bytes

_LORA = "`lora_rank: 32`, which trains adapters only"
ADVICE = {
    "weights": "a smaller model, or `lora_rank` with `precision: bf16-mixed`, which keeps the base "
    "model in bfloat16",
    "reference model": "`beta: 0`, or `lora_rank`, whose base model is the reference",
    "gradients": _LORA,
    "optimizer state": _LORA,
    "engine weights": "`TransformersEngine`, which shares the policy's weights, or on a GPU "
    "`enable_sleep_mode: true`",
    "key-value cache": "fewer slots or a `memory_budget` (`MicroGroupSampling`), a shorter "
    "`max_completion_length`, or on a GPU a lower `gpu_memory_utilization`",
    "decoding": "fewer slots (`MicroGroupSampling`)",
    "activations": "`gradient_checkpointing: true`, or a smaller `micro_batch_tokens`",
    "passes at their peak": "a smaller `micro_batch_tokens`, or `lora_rank`; for AdamW's "
    "temporaries `optim: adamw_torch_fused`",
    "completions": "fewer `prompts_per_round` or `num_generations`",
}
"""What reduces each item of the ledger."""
NOT_COUNTED = {
    "cpu": "the interpreter and its libraries (0.5 GiB, with vLLM 1 GiB), buffers of vLLM's steps, "
    "reward processes, memory that malloc keeps",
    "cuda": "the CUDA context (about 0.5 GiB), memory that PyTorch's allocator keeps, CUDA graphs",
}


def report(ledger: Ledger) -> str:
    """Return the table of what takes memory, whether it fits, and the largest settings that do."""
    run, items = ledger.run, ledger.items()
    on_cpu = run.device == "cpu"
    device = [i for i in items if on_cpu or not i.host]
    total = Item("total", *ledger.peak(items), f"of {format_bytes(ledger.memory)}")
    lines = [
        _line(f"in {'main' if on_cpu else 'GPU'} memory", "rollout", "update", "how it follows"),
        *map(_item, device),
        _line("", "-" * 10, "-" * 10, ""),
        _item(total),
    ]
    if len(device) < len(items):
        host = [i for i in items if i.host]
        lines += ["", _line("in main memory", "", "", ""), *map(_item, host)]
    drawn = run.most_prompts * ledger.num_generations
    engines = len(run.datamodule.engine.engines)
    where = f" on {engines} engines" if engines > 1 else ""
    at_once = f"Up to {ledger.slots:,} of a round's {drawn:,} completions decode at once"
    lines += ["", f"{at_once}{where}."]
    lines += ["", f"Not counted: {NOT_COUNTED[run.device]}.", "", *_verdict(ledger, device)]
    return "\n".join(line.rstrip() for line in lines)


def _verdict(ledger: Ledger, device: list[Item]) -> list[str]:
    rollout, update = ledger.peak(device)
    phase = "rollout" if rollout > update else "update"
    over = max(rollout, update) - ledger.memory
    if over <= 0:
        lines = [f"Fits: the {phase} needs the most and leaves {format_bytes(-over)}."]
    else:
        lines = [
            f"Does not fit: the {phase} needs {format_bytes(over)} more than there is. What helps:"
        ]
        sizes = {i.name: getattr(i, phase) for i in device if i.name in ADVICE}
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
        lines += [
            f"  {name} ({format_bytes(sizes[name])}): {ADVICE[name]}"
            for name in largest
            if sizes[name] * 10 > over
        ]
    held = sum(getattr(i, phase) for i in device if i.name in ("weights", "engine weights"))
    if held > ledger.memory:
        return [*lines, "Not even the weights fit."]
    generations = ledger.largest_num_generations()
    tokens, most = ledger.largest_micro_batch_tokens(), ledger.most_micro_batch_tokens
    cut = tokens == most < ledger.run.most_positions(ledger.num_generations)
    return [
        *lines,
        _largest(
            "num_generations", ledger.num_generations, generations, generations == MOST_GENERATIONS
        ),
        _largest("micro_batch_tokens", ledger.micro_batch_tokens, tokens, cut),
    ]


def _largest(name: str, configured: int, found: int, cut: bool) -> str:
    value = f"{found:,}{' or more' * cut}" if found else "none fits"
    return f"{f'Largest {name}:':28}{value} (configured {configured:,})"


def _item(item: Item) -> str:
    return _line(item.name, format_bytes(item.rollout), format_bytes(item.update), item.how)


def _line(name: str, rollout: str, update: str, how: str) -> str:
    return f"{name:21} {rollout:>10}  {update:>10}  {how}"


def device_memory(device: Device, given: str | None = None) -> int:
    """Return the memory of the device in bytes.

    Args:
        device: Type of the device.
        given: Size such as `24GiB`. By default the GPU's total memory, or the available main
            memory of this machine.

    Raises:
        ValueError: `given` is not a size, or this machine has no GPU to ask.
    """
    if given is not None:
        return parse_bytes(given, "memory")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "`memory=None`: this machine has no GPU. Give the memory of the GPU that the run "
                "will use, such as `--memory 24GiB`."
            )
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        (line,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(line) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
