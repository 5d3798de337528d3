"""What a run holds in its rollouts and in its updates, and how much more would fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lit_rlsched.engines.base import Footprint, Sizes
from lit_rlsched.estimate.live import object_bytes, storage_bytes
from lit_rlsched.estimate.run import PlannedRun
from lit_rlsched.policy import base_model, find_policy
from lit_rlsched.training.logprobs import default_chunk
from lit_rlsched.types import Completion

SAMPLE = 1000
"""Prompts that are counted object by object; more are extended from them."""
MOST_GENERATIONS = 1 << 16
FURTHEST = 4
"""The largest `micro_batch_tokens` is looked for up to so many times the configured one."""
MOST_TRIES = 5


@dataclass(frozen=True, slots=True)
class Item:
    """Something that is held."""

    name: str
    rollout: int
    """Bytes held while completions decode."""
    update: int
    """Bytes held at the peak of an optimizer step."""
    how: str
    """How they follow from the configuration."""
    host: bool = False
    """Whether it is in the machine's memory also where training is on a GPU."""


class Ledger:
    """Bytes of a planned run.

    Args:
        run: What would run.
        memory: Bytes of the device it is to run on.

    Raises:
        ValueError: the engine's cache would be too small for the run.
    """

    def __init__(self, run: PlannedRun, memory: int) -> None:
        self.run = run
        self.memory = memory
        self.num_generations: int = run.datamodule.num_generations
        self.micro_batch_tokens: int = run.datamodule.micro_batch_tokens
        self._prompts = self._prompt_bytes()
        self.slots = self._slots()
        """Completions that decode at once, at most."""

    def items(
        self, num_generations: int | None = None, micro_batch_tokens: int | None = None
    ) -> list[Item]:
        """All that is held, with these in place of the configured settings."""
        run, module = self.run, self.run.module
        generations = num_generations or self.num_generations
        positions = micro_batch_tokens or self.micro_batch_tokens
        weights, reference = run.weights()
        state, step = run.optimizer
        gradients = storage_bytes(run.trainable)
        kept, peak = run.update(positions)
        trainable = sum(p.numel() for p in run.trainable)
        slots = run.slots(generations)
        engine = self.engine(slots)
        stays = 1 if engine.stays else 0
        decoding = self._decoding(slots) if engine.like_trainer else 0
        streams = (
            0 if run.datamodule.schedule.streaming is None else 1
        )  # gradients during the rollout too
        hp: Any = module.hparams
        dtype = _name(run.trainable[0].dtype)
        vocab = base_model(find_policy(module)).config.get_text_config().vocab_size
        parameters = sum(p.numel() for p in module.parameters())
        count = f"{trainable:,} trainable parameters"
        at_once = min(default_chunk(run.device, vocab), positions)
        chunk = f"log-probs of {at_once:,} positions at a time, {vocab:,} logits each"
        if step > peak:  # it comes when the activations are gone
            chunk = "AdamW's temporaries, more than the passes take"
        recomputed = "each layer's input; the rest is computed again" * hp.gradient_checkpointing
        drawn = run.most_prompts * generations
        objects = f"{drawn:,} of {run.limit:,} tokens: ids and log-probs, Python objects"
        handed = engine.handed_over
        prompts, completions = self._prompts, drawn * self._completion
        items = [
            Item("weights", weights, weights, f"{parameters:,} parameters, {self._precision}"),
            Item("reference model", reference, reference, "a second copy, as beta > 0"),
            Item("gradients", streams * gradients, gradients, count),
            Item("optimizer state", state, state, f"AdamW, two {dtype} of each of these"),
            Item("engine weights", engine.weights, stays * engine.weights, engine.how_weights),
            Item("key-value cache", engine.cache, stays * engine.cache, engine.how_cache),
            Item("decoding", decoding, 0, "what its largest step takes beside the cache"),
            Item("weights handed over", handed, handed, "to the engine's process", True),
            Item(
                "activations",
                streams * kept,
                kept,
                f"measured: {positions:,} positions, {recomputed or 'all kept for backward'}",
            ),
            Item(
                "passes at their peak",
                streams * (peak - kept),
                max(peak, step) - kept,
                f"measured: {chunk}",
            ),
            Item("prompts", prompts, prompts, f"{len(run.prompts):,}, ids once each", True),
            Item("completions", completions, completions, objects, True),
        ]
        return [item for item in items if item.rollout or item.update]

    @property
    def _precision(self) -> str:
        return f"{_name(next(self.run.module.parameters()).dtype)}, `precision=" + (
            f"{self.run.trainer.precision}`"
        )

    @cached_property
    def _completion(self) -> int:
        """Bytes of a completion as long as it may get, as the round holds it."""
        run, length = self.run, self.run.limit
        numbers = [float(i) for i in range(length)]
        filled = Completion(0, [i + 10**6 for i in range(length)], numbers)
        if run.datamodule.steps_per_epoch > 1 or run.module.needs_reference:
            filled.old_logprobs = [x + 0.5 for x in numbers]
        if run.module.needs_reference:
            filled.ref_logprobs = [x + 0.25 for x in numbers]
        return object_bytes(filled)

    def _prompt_bytes(self) -> int:
        prompts = self.run.prompts
        part = prompts[:: -(-len(prompts) // SAMPLE)]
        return object_bytes(part) * len(prompts) // len(part)

    def engine(self, slots: int) -> Footprint:
        """What the engine of the run holds with so many slots."""
        run = self.run
        policy = base_model(find_policy(run.module))
        parameters = sum(p.numel() for name, p in policy.named_parameters() if "lora_" not in name)
        sizes = Sizes(parameters, run.token_bytes, self.memory)
        return run.datamodule.engine.footprint(replace(run.spec, slots=slots), sizes)

    def _decoding(self, slots: int) -> int:
        """What the largest step of the trainer's model takes beside the cache."""
        configured = self.run.spec.slots
        cache = configured * self.run.spec.max_model_len * self.run.token_bytes
        working = max(0, self.run.decoding - cache)
        return max(working, working * slots // configured)

    def _slots(self) -> int:
        """As `fit` finds it once its engine has started."""
        engine, spec = self.run.datamodule.engine, self.run.spec
        held = self.engine(spec.slots)
        capacity = engine.cache_tokens(spec, held, self.run.token_bytes)
        if capacity is None:
            return spec.slots
        engine.kv_capacity = capacity
        return self.run.startup.admission(spec).slots

    # What fits.

    def peak(self, items: list[Item] | None = None) -> tuple[int, int]:
        """Bytes on the device in the rollout and in the update."""
        on_cpu = self.run.device == "cpu"
        held = [i for i in items or self.items() if on_cpu or not i.host]
        return sum(i.rollout for i in held), sum(i.update for i in held)

    def fits(self, **settings: int) -> bool:
        """Whether both phases fit with `num_generations` or `micro_batch_tokens` set to that."""
        return max(self.peak(self.items(**settings))) <= self.memory

    def largest_num_generations(self) -> int:
        """The most that fit; 0 where none do."""
        least = 2 if self.run.module.needs_group else 1
        return _largest(lambda n: self.fits(num_generations=n), least, MOST_GENERATIONS)

    @property
    def most_micro_batch_tokens(self) -> int:
        """Beyond which nothing is tried: a whole optimizer step, or far more than configured."""
        step = self.run.most_positions(self.num_generations)
        return max(self.run.spec.max_model_len, min(step, FURTHEST * self.micro_batch_tokens))

    def largest_micro_batch_tokens(self) -> int:
        """The most that fit; 0 where not even the longest completion does.

        Found along straight lines, and what is found is measured: to 2 % of the memory.
        """
        least, most = self.run.spec.max_model_len, self.most_micro_batch_tokens

        def room(positions: int) -> int:
            return self.memory - max(self.peak(self.items(micro_batch_tokens=positions)))

        before, at = least, min(most, max(self.micro_batch_tokens, 2 * least))
        room_before, room_at = room(before), room(at)
        if room_before < 0 or before == at:
            return before if room_before >= 0 else 0
        found = at if room_at >= 0 else before
        for _ in range(MOST_TRIES):
            slope = (room_before - room_at) / (at - before)
            # a bit short of where the line ends, so that what is found fits
            ahead = most if slope <= 0 else at + int((room_at - self.memory // 200) / slope)
            before, room_before, at = at, room_at, max(least, min(ahead, most))
            if at == before:
                break
            room_at = room(at)
            if room_at >= 0:
                found = max(found, at)
                if room_at < self.memory // 50:
                    break
        return found


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number that fits, by bisection; 0 where not even the least does."""
    if not fits(least):
        return 0
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
