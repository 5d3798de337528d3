"""Memory of a planned run in its rollouts and updates, and the largest settings that fit."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning import LightningModule

from lit_rlsched.cli.estimate.live import device_memory, object_bytes, storage_bytes
from lit_rlsched.cli.estimate.run import PlannedRun
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.ray_engine import RayEngine
from lit_rlsched.engines.spec import EngineSpec, Footprint, Sizes
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.training.logprobs import default_chunk
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import find_policy, local
from lit_rlsched.types import Completion

MOST_GENERATIONS = 1 << 16
"""Largest `num_generations` that is tried."""
FURTHEST = 4
"""The largest `micro_batch_tokens` that is tried, as a multiple of the configured value."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the ledger."""

    name: str
    rollout: int
    """Bytes while completions decode."""
    update: int
    """Bytes at the peak of an optimizer step."""
    how: str
    """How the bytes follow from the configuration."""
    host: bool = False
    """Whether the bytes are in main memory even if the run trains on a GPU."""
    apart: bool = False
    """Whether the bytes are on an engine's GPU, which the trainer does not use."""


class Ledger:
    """Memory of a planned run.

    Args:
        run: The planned run.
        memory: Memory of its device in bytes; if engines have GPUs of their own, of each of them.

    Raises:
        ValueError: the engine's key-value cache would be too small.
    """

    def __init__(self, run: PlannedRun, memory: int) -> None:
        self.run = run
        self.memory = memory
        self.num_generations: int = run.settings.num_generations
        self.micro_batch_tokens: int = run.settings.micro_batch_tokens
        self.prompts = run.startup.prompts
        self.slots = self._slots()
        """Maximum number of completions that decode at once."""

    def items(
        self, num_generations: int | None = None, micro_batch_tokens: int | None = None
    ) -> list[Item]:
        """Return all items that take memory, with these values in place of the configured ones."""
        generations = num_generations or self.num_generations
        step = self.run.most_positions(generations)  # which may be less than a micro-batch holds
        positions = min(micro_batch_tokens or self.micro_batch_tokens, step)
        items = [
            *self._model_items(),
            *self._engine_items(self.run.slots(generations)),
            *self._pass_items(positions),
            *self._object_items(self.run.most_prompts * generations),
        ]
        return [item for item in items if item.rollout or item.update]

    @property
    def _streams(self) -> bool:
        """Whether gradients are computed during the rollout."""
        return self.run.schedule.streaming is not None

    @property
    def _ahead(self) -> bool:
        """Whether rounds are drawn during the update."""
        return self.run.schedule.ahead

    def _model_items(self) -> Iterator[Item]:
        run, module, ranks = self.run, self.run.module, self.run.shards
        parameters = list(module.parameters())
        references: list[Any] = module._reference
        weights = storage_bytes(_tensors(module))
        reference = storage_bytes(t for model in references for t in _tensors(model))
        gradients, (state, _) = storage_bytes(run.trainable), run.optimizer
        count = f"{sum(p.numel() for p in run.trainable):,} trainable parameters"
        how = f"{sum(p.numel() for p in parameters):,} parameters, {_name(parameters[0].dtype)}"
        how = f"{how}, `precision={run.trainer.precision}`"
        shared = "" if ranks == 1 else f", a part of {ranks}"
        weights, reference, gradients, state = (
            -(-size // ranks) for size in (weights, reference, gradients, state)
        )
        yield Item("weights", weights, weights, how + shared)
        yield Item("reference model", reference, reference, "a second copy, because beta > 0")
        yield Item("gradients", gradients * self._streams, gradients, count + shared)
        how = f"AdamW, two {_name(run.trainable[0].dtype)} per trainable parameter"
        yield Item("optimizer state", state, state, how + shared)
        gathered = run.gathered
        how = "embedding, LM head and two layers, with the gradient of one"
        rule, steps = run.schedule.rule, run.settings.steps_per_epoch
        if rule.verifies_from is not None:
            copies = (rule.max_staleness or 0) // steps + 1
            how = "the trained ones at the time tokens were drawn that may be verified"
            how = how if copies == 1 else f"{how}, {copies} copies"
            kept = copies * storage_bytes(run.trainable)
            yield Item("kept weights", kept, kept, how, host=True)
        yield Item("gathered weights", gathered * self._streams, gathered, how)

    def _engine_items(self, slots: int) -> Iterator[Item]:
        engine, spec = self.engine(slots), self.run.spec
        stays, handed, apart = int(engine.stays), engine.handed_over, engine.apart
        decoding = 0
        if engine.like_trainer:
            cache = spec.slots * spec.max_model_len * self.run.token_bytes
            beside = max(0, self.run.decoding - cache)
            decoding = max(beside, beside * slots // spec.slots)
            if self.run.device == "cuda":  # each engine has its own GPU
                decoding //= len(self.run.settings.engine.engines)
        for name, size, after, how in (
            ("engine weights", engine.weights, stays * engine.weights, engine.how_weights),
            ("key-value cache", engine.cache, stays * engine.cache, engine.how_cache),
            (
                "decoding",
                decoding,
                decoding if self._ahead else 0,
                "temporaries of the largest decode step",
            ),
        ):
            yield Item(name, size, after, how, apart=apart)
        how = "to the engine's process"
        if isinstance(self.run.settings.engine.engines[0], RayEngine):
            how = "in Ray's object store; nodes with engines have a copy each"
        yield Item("weights handed over", handed, handed, how, host=True)
        how = "of vLLM, in the update" + ", on the engines' nodes" * apart
        yield Item("sleeping weights", 0, engine.asleep, how, host=True)

    def _pass_items(self, positions: int) -> Iterator[Item]:
        run, module = self.run, self.run.module
        (kept, peak), (_, step) = run.update(positions), run.optimizer
        vocab = base_model(find_policy(module)).config.get_text_config().vocab_size
        chunk = min(default_chunk(run.device, vocab), positions)
        kinds = "all kept for the backward pass"
        if module.hparams["gradient_checkpointing"]:
            kinds = "the input of each layer, the rest is computed again"
        how = f"log-probs of {chunk:,} positions at a time, {vocab:,} logits each"
        if step > peak:  # the optimizer steps when the activations are freed
            how = "AdamW's temporaries, which are larger than those of the passes"
        yield Item(
            "activations", kept * self._streams, kept, f"measured: {positions:,} positions, {kinds}"
        )
        beside = (peak - kept) * self._streams
        yield Item("passes at their peak", beside, max(peak, step) - kept, f"measured: {how}")

    def _object_items(self, drawn: int) -> Iterator[Item]:
        how, held = f"indices of {len(self.prompts):,}; rows are on disk", self.prompts.memory
        yield Item("prompts", held, held, how, host=True)
        how = f"{drawn:,} of {self.run.limit:,} tokens: ids and log-probs as arrays"
        completions = (1 + bool(self._ahead)) * drawn * self._completion_bytes
        yield Item("completions", completions, completions, how, host=True)

    @cached_property
    def _completion_bytes(self) -> int:
        """Bytes of a completion of full length in the update."""
        run, length = self.run, self.run.limit
        completion = Completion(0, array("i", bytes(4 * length)), array("d", bytes(8 * length)))
        if run.settings.steps_per_epoch > 1 or run.module.needs_reference:
            completion.old_logprobs = completion.logprobs[:]
        if run.module.needs_reference:
            completion.ref_logprobs = completion.logprobs[:]
        return object_bytes(completion)

    def engine(self, slots: int) -> Footprint:
        """Return what the run's engine holds with this number of slots."""
        run = self.run
        spec = replace(run.spec, slots=slots)
        held = _footprint(run.settings.engine, spec, run.module, run.token_bytes, self.memory)
        return replace(held, stays=True, asleep=0) if self._ahead else held

    def _slots(self) -> int:
        """Return the slots that `fit` uses once its engine has started."""
        engine, spec = self.run.settings.engine, self.run.spec
        held = self.engine(spec.slots)
        capacity = engine.cache_tokens(spec, held, self.run.token_bytes)
        if capacity is None:
            return spec.slots
        engine.kv_capacity = capacity
        return len(engine.engines) * self.run.startup.admission(spec).slots

    def on_device(self, items: list[Item], apart: bool = False) -> list[Item]:
        """Return the items on the trainer's device, or those on an engine's own GPU."""
        on_cpu = self.run.device == "cpu"
        return [i for i in items if i.apart == apart and (on_cpu or not i.host)]

    def peak(self, items: list[Item] | None = None) -> tuple[int, int]:
        """Return the bytes on the trainer's device in the rollout and in the update."""
        return total(self.on_device(items or self.items()))

    def fits(self, **settings: int) -> bool:
        """Return whether rollout and update fit, with these settings as in `items`."""
        items = self.items(**settings)
        engine = total(self.on_device(items, apart=True))
        return max(*self.peak(items), *engine) <= self.memory

    def largest_num_generations(self) -> int:
        """Return the largest `num_generations` that fits; 0 if none does."""
        least = 2 if self.run.module.needs_group else 1
        tried = range(least, MOST_GENERATIONS + 1)
        fitting = bisect_left(tried, True, key=lambda n: not self.fits(num_generations=n))
        return tried[fitting - 1] if fitting else 0

    @property
    def most_micro_batch_tokens(self) -> int:
        """Largest `micro_batch_tokens` that is tried: at most a whole optimizer step."""
        step = self.run.most_positions(self.num_generations)
        return max(self.run.spec.max_model_len, min(step, FURTHEST * self.micro_batch_tokens))

    def largest_micro_batch_tokens(self) -> int:
        """Return the largest `micro_batch_tokens` that fits, to about 3 %; 0 if none does."""
        least, most = self.run.spec.max_model_len, self.most_micro_batch_tokens
        # each value tried runs a forward and a backward pass: seven of them at most
        tried = np.unique(np.geomspace(least, most, 127).round().astype(int)).tolist()
        fitting = bisect_left(tried, True, key=lambda n: not self.fits(micro_batch_tokens=n))
        return int(tried[fitting - 1]) if fitting else 0


def total(items: list[Item]) -> tuple[int, int]:
    """Return the bytes of all items in the rollout and in the update."""
    return sum(i.rollout for i in items), sum(i.update for i in items)


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def counted_peaks(module: LightningModule, run: TrainingRun) -> tuple[int, int]:
    """Return rank 0's bytes of weights, gradients, optimizer state and engine in a started run.

    Engines on GPUs of their own, activations and the temporaries of decode steps are left out:
    `Ledger` measures the latter two on fake tensors, which takes longer.

    Args:
        module: The module, with its policy.
        run: The run, whose engine has started.

    Returns:
        Bytes in the rollout, and at the peak of the update.
    """
    assert run.session is not None
    models, spec = [module, *getattr(module, "_reference", ())], run.session.spec
    weights = storage_bytes(local(tensor) for model in models for tensor in _tensors(model))
    gradients = storage_bytes(local(p) for p in module.parameters() if p.requires_grad)
    state = 2 * gradients  # AdamW's
    tokens = run.startup.cache_bytes_per_token(spec)
    engine = _footprint(run.settings.engine, spec, module, tokens, device_memory(spec.device.type))
    beside = 0 if engine.apart else engine.weights + engine.cache
    streams, ahead = run.schedule.streaming is not None, run.schedule.ahead
    rollout = weights + state + beside + streams * gradients
    return rollout, weights + state + gradients + (engine.stays or ahead) * beside


def _footprint(
    engine: RolloutEngine, spec: EngineSpec, module: LightningModule, token_bytes: int, memory: int
) -> Footprint:
    named = base_model(find_policy(module)).named_parameters()
    parameters = sum(p.numel() for name, p in named if "lora_" not in name)
    return engine.footprint(spec, Sizes(parameters, token_bytes, memory))
