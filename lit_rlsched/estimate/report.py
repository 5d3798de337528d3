"""The ledger as text."""

import os
import re
from pathlib import Path

import torch

from lit_rlsched.estimate.ledger import MOST_GENERATIONS, Item, Ledger
from lit_rlsched.estimate.run import Device
from lit_rlsched.sizes import format_bytes, parse_bytes

ADVICE = {
    "weights": "a smaller model; or `lora_rank` with `precision: bf16-mixed`, whose base is in "
    "bfloat16",
    "reference model": "`beta: 0`, or `lora_rank`, whose base is the reference",
    "gradients": "`lora_rank: 32`, which trains adapters alone",
    "optimizer state": "`lora_rank: 32`, which trains adapters alone",
    "engine weights": "`TransformersEngine`, which has no weights of its own; on a GPU "
    "`enable_sleep_mode: true`",
    "key-value cache": "fewer slots or a `memory_budget` (`MicroGroupSampling`), a shorter "
    "`max_completion_length`; on a GPU a lower `gpu_memory_utilization`",
    "decoding": "fewer slots (`MicroGroupSampling`)",
    "activations": "`gradient_checkpointing: true`, or fewer `micro_batch_tokens`",
    "passes at their peak": "fewer `micro_batch_tokens`, or `lora_rank`; of AdamW's temporaries "
    "`optim: adamw_torch_fused`",
    "completions": "fewer `prompts_per_round` or `num_generations`",
}
NOT_COUNTED = {
    "cpu": "the interpreter and its libraries (0.5 GiB, with vLLM 1 GiB), vLLM's own steps, reward "
    "processes, what malloc keeps",
    "cuda": "the CUDA context (about 0.5 GiB), what PyTorch's allocator keeps, CUDA graphs",
}


def report(ledger: Ledger) -> str:
    """The table of what is held, and what else would fit."""
    run, items = ledger.run, ledger.items()
    on_cpu = run.device == "cpu"
    device = [i for i in items if on_cpu or not i.host]
    rollout, update = ledger.peak(items)
    total = Item("together", rollout, update, f"of {format_bytes(ledger.memory)}")
    where = "in the machine's memory" if on_cpu else "on the GPU"
    lines = [
        _line(f"held {where}", "rollout", "update", "how it follows"),
        *map(_item, device),
        _line("", "-" * 10, "-" * 10, ""),
        _item(total),
    ]
    host = [] if on_cpu else [i for i in items if i.host]
    if host:
        lines += ["", _line("beside it, in the machine's memory", "", "", ""), *map(_item, host)]
    drawn = run.most_prompts * ledger.num_generations
    lines += ["", f"Decode at once, at most: {ledger.slots:,} of a round's {drawn:,} completions."]
    lines += ["", f"Not counted: {NOT_COUNTED[run.device]}.", "", *_verdict(ledger, device)]
    return "\n".join(line.rstrip() for line in lines)


def _verdict(ledger: Ledger, device: list[Item]) -> list[str]:
    rollout, update = ledger.peak(device)
    phase = "rollout" if rollout > update else "update"
    over = max(rollout, update) - ledger.memory
    if over <= 0:
        lines = [f"Fits: the {phase} is the larger, and leaves {format_bytes(-over)}."]
    else:
        lines = [
            f"Does not fit: the {phase} takes {format_bytes(over)} more than there are. What helps:"
        ]
        large = sorted(device, key=lambda i: -getattr(i, phase))
        shown = [i for i in large if i.name in ADVICE and getattr(i, phase) * 10 > over][:4]
        lines += [
            f"  {i.name} ({format_bytes(getattr(i, phase))}): {ADVICE[i.name]}" for i in shown
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
            "num_generations",
            ledger.num_generations,
            generations,
            generations == MOST_GENERATIONS,
        ),
        _largest("micro_batch_tokens", ledger.micro_batch_tokens, tokens, cut),
    ]


def _largest(name: str, configured: int, found: int, cut: bool) -> str:
    value = f"{found:,}{' or more' * cut}" if found else "none fits"
    return f"{f'Largest {name}:':28}{value} (configured {configured:,})"


def _item(item: Item) -> str:
    return _line(item.name, format_bytes(item.rollout), format_bytes(item.update), item.how)


def _line(name: str, rollout: str, update: str, how: str) -> str:
    return f"{name:31} {rollout:>10}  {update:>10}  {how}"


def device_memory(device: Device, given: str | None = None) -> int:
    """Bytes of the device: those given, all of the GPU's, or what the machine has available.

    Raises:
        ValueError: what is given is no size, or there is no such device here to ask.
    """
    if given is not None:
        return parse_bytes(given, "memory")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "`memory=None`: this machine has no GPU to ask. Say how much memory the run's has, "
                "such as `--memory 24GiB`."
            )
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        (line,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(line) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
