"""A configured run without its weights, and the passes it would make, run on fake tensors."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from lightning import Trainer
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoTokenizer

from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines.transformers import TransformersEngine
from lit_rlsched.estimate.live import (
    LiveBytes,
    chunks_as_on,
    configure_without_weights,
    make_fake,
    storage_bytes,
)
from lit_rlsched.module import PolicyModule
from lit_rlsched.policy import find_policy
from lit_rlsched.precision import to_like
from lit_rlsched.startup import Startup
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
from lit_rlsched.training.optimizers import is_fused
from lit_rlsched.types import Completion, Group, Prompt, Request, Sample, Sampling

Device = Literal["cpu", "cuda"]


class PlannedRun:
    """What `fit` would run, up to where it would start its engine.

    The checks of `fit` are made by its own code. Weights are neither loaded nor allocated.

    Args:
        trainer: On CPU, whatever the run will use; its precision counts.
        module: Not configured yet.
        datamodule: Of the run.
        device: What the run will train on.

    Raises:
        ValueError: the configuration cannot run, or its model has no tokenizer.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: PolicyModule,
        datamodule: RolloutDataModule,
        device: Device = "cpu",
    ) -> None:
        self.trainer, self.module, self.datamodule, self.device = (
            trainer,
            module,
            datamodule,
            device,
        )
        trainer.strategy.connect(module)
        module.trainer = trainer  # whose precision says what is loaded
        configure_without_weights(module)
        _check_tokenizer(datamodule.tokenizer_name or module.hparams["model"])
        trainer.precision_plugin.convert_module(module)
        references: list[Any] = module._reference
        like = next(module.parameters())
        for reference in references:
            to_like(reference, like)
        make_fake(module, *references)
        self.startup = self._planned()
        self.spec = replace(self.startup.spec, device=torch.device(device))
        self.token_bytes = self.startup.cache_bytes_per_token(self.spec)
        self.spec = replace(self.spec, slots=self.slots(datamodule.num_generations))
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.trainable:  # as after the first micro-batch
            parameter.grad = torch.empty_like(parameter)
        self._passes: dict[int, tuple[int, int]] = {}

    def _planned(self) -> Startup:
        trainer, module, data = self.trainer, self.module, self.datamodule
        data.trainer, trainer.datamodule = trainer, data  # type: ignore[attr-defined]
        data.setup("fit")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(callback, "sets", None):  # the others may open files
                callback.setup(trainer, module, "fit")

        return Startup(data)

    @property
    def prompts(self) -> list[Prompt]:
        """All that the run reads."""
        return self.startup.prompts.all

    @property
    def limit(self) -> int:
        """Most tokens of a completion."""
        return self.datamodule.sampling.max_completion_length

    def slots(self, num_generations: int) -> int:
        """Completions that decode at once if groups were that large."""
        return self.startup.slots(self.spec, num_generations)

    @property
    def most_prompts(self) -> int:
        """Prompts of the largest round."""
        data = self.datamodule
        replaced = data.schedule.max_num_gen_batches * data.schedule.rule.update_prompts
        return max(data.schedule.rule.most_prompts(), replaced)

    def most_positions(self, num_generations: int) -> int:
        """Positions of an optimizer step in which every completion is as long as it may get."""
        data = self.datamodule
        prompts = -(-data.schedule.rule.update_prompts // data.steps_per_round)
        return prompts * num_generations * self.spec.max_model_len

    # Bytes that the passes take, on fake tensors.

    def weights(self) -> tuple[int, int]:
        """The trainer's, and the reference model's."""
        module: Any = self.module
        references = [p for reference in module._reference for p in _tensors(reference)]
        return storage_bytes(_tensors(module)), storage_bytes(references)

    @cached_property
    def optimizer(self) -> tuple[int, int]:
        """AdamW's state, and the most that a step takes beside it."""
        fused = is_fused(self.module.hparams["optim"], self.device)
        # on a GPU, PyTorch takes a step that is not fused for all parameters at once
        foreach = self.device == "cuda" and not fused
        optimizer = torch.optim.AdamW(self.trainable, foreach=foreach, fused=fused)
        optimizer.step()
        state = [t for held in optimizer.state.values() for t in held.values()]
        live = _measured(optimizer.step)
        return storage_bytes(state), live.peak

    def update(self, micro_batch_tokens: int) -> tuple[int, int]:
        """One micro-batch: what is kept for the backward pass, and the peak.

        It has as many full-length completions as there is room for, after the shortest prompt: the
        scored positions are the expensive ones.

        Returns:
            Bytes alive after the forward pass and the most there were, gradients not counted.
        """
        if micro_batch_tokens not in self._passes:
            batch = self.micro_batch(micro_batch_tokens)
            kept = 0

            def step() -> None:
                nonlocal kept
                output = self.module.loss(batch)
                kept = live.now
                output.loss.backward()

            live = LiveBytes()
            with self.trainer.precision_plugin.forward_context(), chunks_as_on(self.device):
                _measured(step, live)
            self._passes[micro_batch_tokens] = kept, live.peak
        return self._passes[micro_batch_tokens]

    def micro_batch(self, positions: int) -> MicroBatch:
        """As many full-length completions as fit into so many positions; prompts fill the rest."""
        data, prompt = self.datamodule, self.startup.prompts.shortest
        rows = max(1, positions // (prompt + self.limit))
        return fake_batch(
            rows,
            positions // rows - self.limit,
            self.limit,
            data.sampling,
            old=data.steps_per_epoch > 1 or self.module.needs_reference,
            reference=self.module.needs_reference,
        )

    @cached_property
    def decoding(self) -> int:
        """The most that prefill and decode steps of the `TransformersEngine` take, cache included.

        Slots are full; all completions have reached their longest.
        """
        spec, data = self.spec, self.datamodule
        engine = TransformersEngine()
        engine.start(replace(spec, device=torch.device("cpu"), policy=find_policy(self.module)))
        longest = self.startup.prompts.longest
        sampling = replace(data.sampling, max_completion_length=self.limit)
        # different prompts for each group: those of a group are computed once
        requests = [
            Request(str(i), (0,) * (longest - 1) + (i // data.num_generations % 2,), i, sampling)
            for i in range(spec.slots)
        ]

        def run() -> None:
            engine.submit(requests)
            length = longest
            while length < spec.max_model_len:  # as the cache grows, with the old beside the new
                length = min(2 * length, spec.max_model_len)
                engine._integers[1] = length - 1
                with suppress(DataDependentOutputException):  # a fake token cannot be told
                    engine.step()

        return _measured(run).peak


def _check_tokenizer(name: str) -> None:
    try:  # without its files, some are made with no vocabulary
        works = bool(AutoTokenizer.from_pretrained(name)("0")["input_ids"])
    except (OSError, ValueError):
        works = False
    if not works:
        raise ValueError(
            f"`{name}` has no tokenizer, and the lengths of the prompts decide what the run holds. "
            "Give a folder or a hub name that has one with `--data.tokenizer=...`."
        )


def fake_batch(
    rows: int, prompt: int, completion: int, sampling: Sampling, *, old: bool, reference: bool
) -> MicroBatch:
    """A micro-batch of equally long rows, each with a prompt of its own."""
    made = []
    for i in range(rows):
        logprobs = [-1.0] * completion
        drawn = Completion(
            0,
            [0] * completion,
            logprobs,
            [(0, completion)],
            "stop",
            advantage=1.0,
            old_logprobs=logprobs if old else None,
            ref_logprobs=logprobs if reference else None,
        )
        group = Group(str(i), Prompt(str(i), "", (0,) * prompt), sampling, [drawn])
        made.append(Sample(group, drawn))
    (batch,) = OptimizerStep(made, rows * (prompt + completion))
    return batch


def _measured(step: Callable[[], Any], live: LiveBytes | None = None) -> LiveBytes:
    live = live or LiveBytes()
    gc.collect()
    with live:
        step()
    return live


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
