"""The report that `lit-rlsched estimate` prints."""

import math
from typing import NamedTuple

from lit_rlsched.cli.estimate.ledger import MOST_GENERATIONS, Item, Ledger, total
from lit_rlsched.engines.ray_engine import RayEngine
from lit_rlsched.text import format_bytes

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
ADVICE_APART = {"engine weights": "a smaller model, or a larger `tensor_parallel_size`"}
"""What reduces items on an engine's own GPU instead."""
OBJECT_STORE_SHARE = 0.3
"""Ray's default share of a node's memory for its object store."""
NOT_COUNTED = {
    "cpu": "the interpreter and its libraries (0.5 GiB, with vLLM 1 GiB), buffers of vLLM's steps, "
    "reward processes, memory that malloc keeps",
    "cuda": "the CUDA context (about 0.5 GiB), memory that PyTorch's allocator keeps, CUDA graphs",
}


def report(ledger: Ledger) -> str:
    """Return the table of what takes memory, whether it fits, and the largest settings that do."""
    run, items = ledger.run, ledger.items()
    on_cpu = run.device == "cpu"
    tables = [_Table(f"in {'main' if on_cpu else 'GPU'} memory", "", ledger.on_device(items))]
    if apart := ledger.on_device(items, apart=True):
        tables = [
            _Table("on the trainer's GPU", "The trainer ", tables[0].items),
            _Table("on an engine's GPU", "An engine ", apart),
        ]
    lines = []
    for table in tables:
        whole = Item("total", *total(table.items), f"of {format_bytes(ledger.memory)}")
        lines += [
            _line(table.title, "rollout", "update", "how it follows"),
            *map(_item, table.items),
            _line("", "-" * 10, "-" * 10, ""),
            _item(whole),
            "",
        ]
    if host := [i for i in items if i.host and not on_cpu]:
        lines += [_line("in main memory", "", "", ""), *map(_item, host), ""]
    drawn = run.most_prompts * ledger.num_generations
    engines = len(run.settings.engine.engines)
    where = f" on {engines} engines" if engines > 1 else ""
    at_once = f"Up to {ledger.slots:,} of a round's {drawn:,} completions decode at once"
    lines += [f"{at_once}{where}.", "", *_cluster(ledger)]
    lines += [f"Not counted: {NOT_COUNTED[run.device]}.", "", *_verdict(ledger, tables)]
    return "\n".join(line.rstrip() for line in lines)


class _Table(NamedTuple):
    """The items on one device."""

    title: str
    subject: str
    """What begins a sentence about it."""
    items: list[Item]


def _cluster(ledger: Ledger) -> list[str]:
    """Say which resources a Ray cluster must have; nothing without `RayEngine`."""
    run, engines = ledger.run, ledger.run.settings.engine.engines
    first, held = engines[0], ledger.engine(ledger.slots)
    if not isinstance(first, RayEngine):
        return []
    each = " + ".join(f"{amount:g} {name}" for name, amount in first.bundle(run.spec).items())
    where = ""
    if run.device == "cpu":
        where = ". Counted as if all engines were on this node"
    elif held.apart:
        ranks = run.trainer.world_size
        where = f", beside the trainer's {'GPU' if ranks == 1 else f'{ranks} GPUs'}"
    sent = held.handed_over
    store = math.ceil(sent / OBJECT_STORE_SHARE)
    lines = [f"The Ray cluster needs {len(engines)} x ({each}), each on one node{where}."]
    if sent:
        lines += [
            f"A weight sync puts {format_bytes(sent)} into Ray's object store, once on each node. "
            f"By default a store is large enough for it on nodes of {format_bytes(store)} or more."
        ]
    return [*lines, ""]


def _verdict(ledger: Ledger, tables: list[_Table]) -> list[str]:
    lines = [line for table in tables for line in _fit(ledger, table)]
    for table in tables:
        held = [i for i in table.items if i.name in ("weights", "engine weights")]
        if max(total(held)) > ledger.memory:
            return [*lines, "Not even the weights fit."]
    generations = ledger.largest_num_generations()
    tokens, most = ledger.largest_micro_batch_tokens(), ledger.most_micro_batch_tokens
    whole = ledger.run.most_positions(ledger.num_generations)
    of_tokens = _largest("micro_batch_tokens", ledger.micro_batch_tokens, tokens, tokens == most)
    if tokens >= whole:
        any_does = f"any value: a whole optimizer step of at most {whole:,} positions fits"
        of_tokens = _said("micro_batch_tokens", any_does, ledger.micro_batch_tokens)
    return [
        *lines,
        _largest(
            "num_generations", ledger.num_generations, generations, generations == MOST_GENERATIONS
        ),
        of_tokens,
    ]


def _fit(ledger: Ledger, table: _Table) -> list[str]:
    """Say whether the items of a table fit, and what helps if they do not."""
    rollout, update = total(table.items)
    phase = "update" if update > rollout else "rollout"
    over = max(rollout, update) - ledger.memory
    if over <= 0:
        fits = "fits" if table.subject else "Fits"
        needs = f"the {phase} needs the most and leaves {format_bytes(-over)}"
        return [f"{table.subject}{fits}: {needs}."]
    does = "does" if table.subject else "Does"
    advice = ADVICE | (ADVICE_APART if table.items[0].apart else {})
    sizes = {i.name: getattr(i, phase) for i in table.items if i.name in advice}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
    return [
        f"{table.subject}{does} not fit: the {phase} needs {format_bytes(over)} more than there "
        "is. What helps:",
        *(
            f"  {name} ({format_bytes(sizes[name])}): {advice[name]}"
            for name in largest
            if sizes[name] * 10 > over
        ),
    ]


def _largest(name: str, configured: int, found: int, cut: bool) -> str:
    value = f"{found:,}{' or more' * cut}" if found else "none fits"
    return _said(name, value, configured)


def _said(name: str, value: str, configured: int) -> str:
    return f"{f'Largest {name}:':28}{value} (configured {configured:,})"


def _item(item: Item) -> str:
    return _line(item.name, format_bytes(item.rollout), format_bytes(item.update), item.how)


def _line(name: str, rollout: str, update: str, how: str) -> str:
    return f"{name:21} {rollout:>10}  {update:>10}  {how}"
