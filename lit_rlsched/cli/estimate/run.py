"""A configured run without its weights, whose passes can be measured on fake tensors."""

from array import array
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal
from unittest.mock import patch

import torch
from lightning import Trainer
from torch._subclasses.fake_tensor import DataDependentOutputException

from lit_rlsched.cli.estimate.live import LiveBytes, make_fake, storage_bytes
from lit_rlsched.datamodule import RolloutDataModule
from lit_rlsched.engines.transformers import TransformersEngine
from lit_rlsched.module import PolicyModule
from lit_rlsched.run.fsdp2 import is_sharded, layers_of
from lit_rlsched.run.startup import Startup
from lit_rlsched.settings import UsageError
from lit_rlsched.training.logprobs import CHUNK_BYTES
from lit_rlsched.training.micro_batches import MicroBatch, OptimizerStep
from lit_rlsched.training.optimizers import is_fused
from lit_rlsched.training.policy import find_policy, load_tokenizer
from lit_rlsched.training.precision import to_like
from lit_rlsched.types import Completion, Group, Prompt, Request, Sample, Sampling

Device = Literal["cpu", "cuda"]


class PlannedRun:
    """What `fit` would run, up to the start of its engine, with the checks that `fit` makes.

    Weights are neither loaded nor allocated.

    Args:
        trainer: Trainer on the CPU, whatever device the run will use. Its precision matters.
        module: Module that was not configured yet.
        datamodule: Data module of the run.
        device: Device that the run will train on.

    Raises:
        UsageError: the configuration is wrong, or its model has no tokenizer.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: PolicyModule,
        datamodule: RolloutDataModule,
        device: Device = "cpu",
    ) -> None:
        self.trainer, self.module = trainer, module
        self.device: Device = device
        trainer.strategy.connect(module)
        module.trainer = trainer  # its precision decides the dtype of the weights
        with torch.device("meta"):  # makes shapes from `config.json`
            module.configure_model()
        _check_tokenizer(datamodule.run.settings.tokenizer or module.hparams["model"])
        trainer.precision_plugin.convert_module(module)
        references: list[Any] = module._reference
        for reference in references:
            to_like(reference, next(module.parameters()))
        make_fake(module, *references)
        datamodule.trainer, trainer.datamodule = trainer, datamodule  # type: ignore[attr-defined]
        datamodule.setup("fit")
        run = datamodule.run
        self.settings, self.schedule = run.settings, run.schedule
        self.startup = Startup(run.facts, run.schedule, run.rows, trainer, run.team)
        self.spec = replace(self.startup.spec, device=torch.device(device))
        self.token_bytes = self.startup.cache_bytes_per_token(self.spec)
        self.spec = replace(self.spec, slots=self.slots(run.settings.num_generations))
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.trainable:  # as after the first micro-batch
            parameter.grad = torch.empty_like(parameter)
        self._passes: dict[int, tuple[int, int]] = {}

    @property
    def shards(self) -> int:
        """Number of ranks over which weights, gradients and optimizer state are divided."""
        return self.trainer.world_size if is_sharded(self.trainer) else 1

    @cached_property
    def gathered(self) -> int:
        """Bytes of whole weights and gradients that a rank holds at a time, beside its part."""
        if self.shards == 1:
            return 0
        policy = find_policy(self.module)
        layers = [storage_bytes(layer.parameters()) for layer in layers_of(policy)]
        largest = max(layers, default=0)
        return storage_bytes(policy.parameters()) - sum(layers) + 3 * largest

    @property
    def limit(self) -> int:
        """Maximum number of tokens per completion."""
        return self.settings.sampling.max_completion_length

    def slots(self, num_generations: int) -> int:
        """Return how many completions decode at once with groups of this size."""
        return self.startup.slots(self.spec, num_generations)

    @property
    def most_prompts(self) -> int:
        """Number of prompts in the largest round."""
        schedule = self.schedule
        replaced = schedule.max_num_gen_batches * schedule.rule.update_prompts
        return max(schedule.rule.most_prompts(), replaced)

    def most_positions(self, num_generations: int) -> int:
        """Return the positions of an optimizer step in which all completions have full length."""
        rule = self.schedule.rule  # a round that ends early may train on more, if they end together
        trained = self.most_prompts if rule.ends_early else rule.update_prompts
        prompts = -(-trained // self.settings.steps_per_round)
        return prompts * num_generations * self.spec.max_model_len

    @cached_property
    def optimizer(self) -> tuple[int, int]:
        """Bytes of AdamW's state, and the peak of the temporaries of its step."""
        fused = is_fused(self.module.hparams["optim"], self.device)
        # on a GPU, PyTorch's step without fusion handles all parameters at once
        foreach = self.device == "cuda" and not fused
        optimizer = torch.optim.AdamW(self.trainable, foreach=foreach, fused=fused)
        optimizer.step()
        state = [t for tensors in optimizer.state.values() for t in tensors.values()]
        with LiveBytes() as live:
            optimizer.step()
        return storage_bytes(state), live.peak

    def update(self, micro_batch_tokens: int) -> tuple[int, int]:
        """Run the forward and backward pass of one micro-batch on fake tensors.

        Returns:
            Bytes alive after the forward pass, and the peak of both passes, without gradients.
        """
        if micro_batch_tokens not in self._passes:
            batch = self.micro_batch(micro_batch_tokens)
            context = self.trainer.precision_plugin.forward_context()
            # fake tensors are on the CPU: score as many positions at a time as on the real device
            chunks = patch.dict(CHUNK_BYTES, cpu=CHUNK_BYTES[self.device])
            with context, chunks, LiveBytes() as live:
                output = self.module.loss(batch)
                kept = live.now
                output.loss.backward()
            self._passes[micro_batch_tokens] = kept, live.peak
        return self._passes[micro_batch_tokens]

    def micro_batch(self, positions: int) -> MicroBatch:
        """Return as many full-length completions as fit into these positions.

        Their prompts are as short as the data allows and fill the rest, because scored positions
        need the most memory.
        """
        settings, prompt = self.settings, self.startup.prompts.shortest
        rows = max(1, positions // (prompt + self.limit))
        return fake_batch(
            rows,
            positions // rows - self.limit,
            self.limit,
            settings.sampling,
            old=settings.steps_per_epoch > 1 or self.module.needs_reference,
            reference=self.module.needs_reference,
        )

    @cached_property
    def decoding(self) -> int:
        """Peak bytes of `TransformersEngine`'s steps, cache included, with full slots."""
        spec, settings = self.spec, self.settings
        engine = TransformersEngine()
        engine.start(replace(spec, device=torch.device("cpu"), policy=find_policy(self.module)))
        longest = self.startup.prompts.longest
        # neighbouring groups get different prompts: a group's prompt is computed once
        requests = [
            Request(
                str(i),
                (i // settings.num_generations % 2,) + (0,) * (longest - 1),
                i,
                settings.sampling,
            )
            for i in range(spec.slots)
        ]
        with LiveBytes() as live:
            engine.submit(requests)
            length = longest
            while length < spec.max_model_len:  # whenever the cache grows, both copies exist
                length = min(2 * length, spec.max_model_len)
                engine._integers[1] = length - 1
                with suppress(DataDependentOutputException):  # fake tokens have no values
                    engine.step()
        return live.peak


def _check_tokenizer(name: str) -> None:
    try:  # without its files, transformers makes some tokenizers with an empty vocabulary
        works = bool(load_tokenizer(name)("0")["input_ids"])
    except ValueError:
        works = False
    if not works:
        raise UsageError(
            f"`{name}` has no tokenizer, but the estimate depends on the lengths of the prompts. "
            "Name a folder or a hub model that has one with `--data.tokenizer=...`."
        )


def fake_batch(
    rows: int, prompt: int, completion: int, sampling: Sampling, *, old: bool, reference: bool
) -> MicroBatch:
    """Return a micro-batch of `[rows, prompt + completion]` tokens; each row has its own prompt."""
    samples = []
    for i in range(rows):
        logprobs = array("d", [-1.0]) * completion
        drawn = Completion(
            0,
            array("i", [0]) * completion,
            logprobs,
            [(0, completion)],
            "stop",
            advantage=1.0,
            old_logprobs=logprobs if old else None,
            ref_logprobs=logprobs if reference else None,
        )
        group = Group(str(i), Prompt(str(i), "", (0,) * prompt), sampling, [drawn])
        samples.append(Sample(group, drawn))
    (batch,) = OptimizerStep(samples, rows * (prompt + completion))
    return batch
