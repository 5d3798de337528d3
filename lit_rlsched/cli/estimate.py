"""Memory that a run will need, computed before anything is loaded: `lit-rlsched estimate`."""

import gc
import os
import re
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines.spec import Sizes
from lit_rlsched.module import PolicyModule
from lit_rlsched.run.fsdp2 import is_sharded, layers_of
from lit_rlsched.run.startup import Startup
from lit_rlsched.settings import UsageError
from lit_rlsched.text import format_bytes, parse_bytes
from lit_rlsched.training.logprobs import CHUNK_BYTES
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
from lit_rlsched.training.policy import find_policy, load_tokenizer
from lit_rlsched.training.precision import to_like
from lit_rlsched.types import Completion, Group, Prompt, Sample

Place = Literal["trainer", "engine", "main memory"]

ADVICE = {
    "weights": "a smaller model, or `lora_rank` with `precision: bf16-mixed`",
    "reference model": "`beta: 0`, or `lora_rank`, whose base model is the reference",
    "optimizer state": "`lora_rank: 32`, which trains adapters only and has small gradients",
    "engine weights": "`TransformersEngine`, which shares the policy's weights, or on a GPU "
    "`enable_sleep_mode: true`; on GPUs of its own a larger `tensor_parallel_size`",
    "key-value cache": "fewer slots or a `memory_budget` (`MicroGroupSampling`), a shorter "
    "`max_completion_length`, or on a GPU a lower `gpu_memory_utilization`",
    "activations": "`gradient_checkpointing: true`, or a smaller `micro_batch_tokens`",
}
"""What reduces an item."""
NOT_COUNTED = {
    "cpu": "the interpreter and its libraries (0.5 GiB, with vLLM 1 GiB), completions, buffers of "
    "decode steps, reward processes, what malloc keeps",
    "cuda": "the CUDA context (about 0.5 GiB), buffers of decode steps, CUDA graphs, what the "
    "allocator keeps",
}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensor storages that are allocated inside this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        gc.collect(1)  # so that young reference cycles free nothing meanwhile
        self.now = 0
        """Bytes alive now."""
        self.peak = 0
        """Maximum number of bytes alive at once."""
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add((args, kwargs), counted=False)
        out = func(*args, **(kwargs or {}))
        self._add(out)
        return out

    def _add(self, tree: Any, counted: bool = True) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                size = storage.nbytes() if counted else 0
                self._seen.add(storage._cdata)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; tied weights count once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _make_fake(*models: nn.Module) -> None:
    """Replace the tensors of models by fake ones, which have shapes and no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the code reads lengths and masks

    @cache  # so that tied weights stay tied
    def fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty

    for part in (part for model in models for part in model.modules()):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else fake(tensor)  # type: ignore[assignment]


def device_memory(device: str, given: str | None = None) -> int:
    """Return the bytes of `given`, of this machine's GPU, or of its available main memory."""
    if given is not None:
        return parse_bytes(given, "memory")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "`memory=None`: this machine has no GPU. Give the memory of the GPU that the run "
                "will use, such as `--memory 24GiB`."
            )
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        (line,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(line) * 1024
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(slots=True)
class Item:
    """A line of the table: bytes while completions decode, and at the peak of an update."""

    name: str
    rollout: int
    update: int
    how: str
    """How the bytes follow from the configuration."""
    place: Place = "trainer"
    """On a CPU all have one memory, and most engines are on the trainer's GPU."""


class PlannedRun:
    """What `fit` would run, up to the start of its engine, without its weights, on the CPU."""

    def __init__(
        self,
        trainer: Trainer,
        module: PolicyModule,
        datamodule: RolloutDataModule,
        device: Literal["cpu", "cuda"],
        memory: int,
    ) -> None:
        self.trainer, self.module, self.device, self.memory = trainer, module, device, memory
        trainer.strategy.connect(module)
        module.trainer = trainer  # its precision decides the dtype of the weights
        with torch.device("meta"):  # makes shapes from `config.json`
            module.configure_model()
        _check_tokenizer(datamodule.run.settings.tokenizer or module.hparams["model"])
        trainer.precision_plugin.convert_module(module)
        references: list[Any] = module._reference
        for reference in references:
            to_like(reference, next(module.parameters()))
        _make_fake(module, *references)
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.trainable:  # as after the first micro-batch
            parameter.grad = torch.empty_like(parameter)
        datamodule.trainer, trainer.datamodule = trainer, datamodule  # type: ignore[attr-defined]
        datamodule.setup("fit")
        run = datamodule.run
        self.settings, self.schedule, engine = run.settings, run.schedule, run.settings.engine
        self.startup = startup = Startup(run.facts, run.schedule, run.rows, trainer, run.team)
        spec = replace(startup.spec, device=torch.device(device))
        self.spec = replace(spec, slots=startup.slots(spec, run.settings.num_generations))
        named = base_model(find_policy(module)).named_parameters()
        parameters = sum(p.numel() for name, p in named if "lora_" not in name)
        token_bytes = startup.cache_bytes_per_token(spec)
        held = engine.footprint(self.spec, Sizes(parameters, token_bytes, memory))
        capacity = engine.cache_tokens(self.spec, held, token_bytes)
        self.slots = self.spec.slots
        if capacity is not None:  # as it is known once the engine has started
            engine.kv_capacity = capacity
            self.slots = len(engine.engines) * startup.admission(self.spec).slots
        self.engine = replace(held, stays=True, asleep=0) if self.schedule.ahead else held
        rule, batches = self.schedule.rule, self.schedule.max_num_gen_batches
        self.most_prompts = max(rule.most_prompts(), batches * rule.update_prompts)
        """Prompts of the largest round."""

    def micro_batch(self) -> MicroBatch:
        """Return as many full-length completions of short prompts as fit into a micro-batch."""
        settings, rule = self.settings, self.schedule.rule
        # a round that ends early may train on more, if they end together
        prompts = self.most_prompts if rule.ends_early else rule.update_prompts
        step = -(-prompts // settings.steps_per_round) * settings.num_generations
        # scored positions need the most memory
        positions = min(settings.micro_batch_tokens, step * self.spec.max_model_len)
        limit = settings.sampling.max_completion_length
        rows = max(1, positions // (self.startup.prompts.shortest + limit))
        prompt, logprobs = (0,) * (positions // rows - limit), array("d", [-1.0]) * limit
        reference = logprobs if self.module.needs_reference else None
        samples = []
        for i in range(rows):
            drawn = Completion(0, array("i", [0]) * limit, logprobs, [(0, limit)], "stop")
            drawn.advantage, drawn.ref_logprobs = 1.0, reference
            drawn.old_logprobs = logprobs if settings.steps_per_epoch > 1 else reference
            group = Group(str(i), Prompt(str(i), "", prompt), settings.sampling, [drawn])
            samples.append(Sample(group, drawn))
        (batch,) = OptimizerStep(samples, rows * (len(prompt) + limit))
        return batch

    def items(self) -> list[Item]:
        """Return all that takes memory."""
        held, stays = self.engine, int(self.engine.stays)
        place: Place = "engine" if held.apart else "trainer"
        handed = held.handed_over
        items = [
            *self._of_the_model(),
            *self._of_the_passes(),
            Item("engine weights", held.weights, stays * held.weights, held.how_weights, place),
            Item("key-value cache", held.cache, stays * held.cache, held.how_cache, place),
            Item("weights handed over", handed, handed, "to the engine's process", "main memory"),
            Item("sleeping weights", 0, held.asleep, "of vLLM, in the update", "main memory"),
        ]
        for item in items:
            item.place = "trainer" if self.device == "cpu" else item.place
        return [item for item in items if item.rollout or item.update]

    def _of_the_model(self) -> Iterator[Item]:
        module, trainer, schedule = self.module, self.trainer, self.schedule
        ranks = trainer.world_size if is_sharded(trainer) else 1
        part = "" if ranks == 1 else f", a part of {ranks}"
        parameters, trained = list(module.parameters()), storage_bytes(self.trainable)
        streams = schedule.streaming is not None

        def item(name: str, size: int, how: str, in_rollout: bool = True) -> Item:
            return Item(name, -(-size // ranks) * in_rollout, -(-size // ranks), how + part)

        how = f"{sum(p.numel() for p in parameters):,} parameters, `precision={trainer.precision}`"
        yield item("weights", storage_bytes([*parameters, *module.buffers()]), how)
        references: list[Any] = module._reference
        held = storage_bytes(t for of in references for t in [*of.parameters(), *of.buffers()])
        yield item("reference model", held, "a second copy, because beta > 0")
        how = f"{sum(p.numel() for p in self.trainable):,} trainable parameters"
        yield item("gradients", trained, how, streams)
        yield item("optimizer state", 2 * trained, "AdamW: two for each trainable parameter")
        if ranks > 1:
            policy = find_policy(module)
            layers = [storage_bytes(layer.parameters()) for layer in layers_of(policy)]
            gathered = storage_bytes(policy.parameters()) - sum(layers) + 3 * max(layers, default=0)
            how = "embedding, LM head and two layers, with the gradient of one"
            yield Item("gathered weights", gathered * streams, gathered, how)
        if schedule.rule.verifies_from is not None:
            rule = schedule.rule
            size = trained * (1 + (rule.max_staleness or 0))
            how = "the trained ones of each version that has drawn drafts"
            yield Item("weights of the drafts", size, size, how, "main memory")

    def _of_the_passes(self) -> Iterator[Item]:
        """Run the passes of a micro-batch on fake tensors."""
        batch, context = self.micro_batch(), self.trainer.precision_plugin.forward_context()
        # fake tensors are on the CPU: score as many positions at a time as on the real device
        chunks = patch.dict(CHUNK_BYTES, cpu=CHUNK_BYTES[self.device])
        with context, chunks, LiveBytes() as live:
            output = self.module.loss(batch)
            kept = live.now
            output.loss.backward()
        streams = self.schedule.streaming is not None
        how = f"measured: {batch.input_ids.numel():,} positions"
        if self.module.hparams["gradient_checkpointing"]:
            how += ", the input of each layer alone"
        yield Item("activations", kept * streams, kept, how)
        how = "measured: log-probs and gradients of activations"
        yield Item("passes at their peak", (live.peak - kept) * streams, live.peak - kept, how)


def report(run: PlannedRun) -> str:
    """Return a table for each memory, and whether it fits, or what helps if it does not."""
    items, lines, verdict = run.items(), list[str](), list[str]()
    trainer = "in main memory" if run.device == "cpu" else "in GPU memory"
    titles = {"trainer": trainer, "engine": "on an engine's GPU", "main memory": "in main memory"}
    for place, title in titles.items():
        if not (rows := [item for item in items if item.place == place]):
            continue
        lines += [_row(title, "rollout", "update", "how it follows")]
        lines += [_row(row.name, row.rollout, row.update, row.how) for row in rows]
        if place != "main memory":
            of = f"of {format_bytes(run.memory)}"
            lines += [_row("", "-" * 10, "-" * 10, ""), _row("total", *total(rows), of)]
            verdict += _fit(rows, run.memory, "An engine" if place == "engine" else "The run")
        lines.append("")
    drawn = run.most_prompts * run.settings.num_generations
    at_once = f"Up to {run.slots:,} of a round's {drawn:,} completions decode at once."
    lines += [at_once, "", f"Not counted: {NOT_COUNTED[run.device]}.", "", *verdict]
    return "\n".join(lines)


def _fit(rows: Sequence[Item], memory: int, subject: str) -> list[str]:
    """Say whether the items on a device fit, and what helps if they do not."""
    rollout, update = total(rows)
    phase = "update" if update > rollout else "rollout"
    left = memory - max(rollout, update)
    if left >= 0:
        return [f"{subject} fits: the {phase} needs the most and leaves {format_bytes(left)}."]
    sizes = {row.name: getattr(row, phase) for row in rows if row.name in ADVICE}
    more = f"{subject} does not fit: the {phase} needs {format_bytes(-left)} more than there is."
    largest_first = sorted(sizes.items(), key=lambda of: -of[1])
    helps = [f"  {name} ({format_bytes(size)}): {ADVICE[name]}" for name, size in largest_first]
    return [f"{more} What helps:", *helps]


def total(items: Sequence[Item]) -> tuple[int, int]:
    """Return the bytes of all items in the rollout and in the update."""
    return sum(i.rollout for i in items), sum(i.update for i in items)


def _row(name: str, rollout: int | str, update: int | str, how: str) -> str:
    sizes = [format_bytes(size) if isinstance(size, int) else size for size in (rollout, update)]
    return f"{name:21} {sizes[0]:>10}  {sizes[1]:>10}  {how}".rstrip()


def _check_tokenizer(name: str) -> None:
    with suppress(ValueError):
        if load_tokenizer(name)("0")["input_ids"]:  # transformers makes some that know no token
            return
    raise UsageError(
        f"`{name}` has no tokenizer, but the estimate depends on the lengths of the prompts. "
        "Name a folder or a hub model that has one with `--data.tokenizer=...`."
    )
