"""Runs TRL's own code on hand-made tensors, so that no formula of TRL is typed again here.

Rollouts, model forward and reward functions, which are not under test, give fixed tensors;
advantages, importance weights, losses and metrics come out of the methods of a real trainer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

REFERENCE = object()
EOS = 1
REWARD_WEIGHTS = [1.0, 0.5]
PROMPTS, NUM_GENERATIONS, MAX_COMPLETION_LENGTH = 3, 4, 9


@dataclass
class Sample:
    """A made-up generation batch: `[B, C]` tensors in fp64."""

    mask: Tensor
    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    rollout_logp: Tensor
    rewards: Tensor
    """`[B, F]`, NaN where a function gave no score."""
    lengths: list[int]


def make_sample(seed: int = 0, spread: float = 0.4) -> Sample:
    """Ragged lengths, one unscored row, and NaN where the rollout engine reported nothing."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = PROMPTS * NUM_GENERATIONS, MAX_COMPLETION_LENGTH
    lengths = torch.randint(1, width + 1, (batch,), generator=generator)
    lengths[0] = width
    mask = torch.arange(width) < lengths.unsqueeze(1)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch, width, generator=generator, dtype=torch.float64)

    logp = (-2 + noise(1.0)).clamp(max=-0.01) * mask
    # TRL reads the engine's log-probs as Python floats, into fp32.
    rollout_logp = ((logp + noise(spread)) * mask).float().double()
    rollout_logp[0, 1] = torch.nan
    rewards = torch.rand(batch, 2, generator=generator, dtype=torch.float64)
    rewards[1] = torch.nan
    rewards[5, 0] = torch.nan
    return Sample(
        mask,
        logp,
        (logp + noise(spread)) * mask,
        (logp + noise(spread)) * mask,
        rollout_logp,
        rewards,
        lengths.tolist(),
    )


def build_trainer(kind: str, folder: str, output_dir: Path, **settings: Any) -> Any:
    """A real `GRPOTrainer` or `RLOOTrainer` of the tiny model, on the CPU."""
    trainer_class, config_class = {
        "grpo": (GRPOTrainer, GRPOConfig),
        "rloo": (RLOOTrainer, RLOOConfig),
    }[kind]
    config = config_class(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        num_generations=NUM_GENERATIONS,
        max_completion_length=MAX_COMPLETION_LENGTH,
        reward_weights=REWARD_WEIGHTS,
        **{"per_device_train_batch_size": PROMPTS * NUM_GENERATIONS, **settings},
    )
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        train_dataset=Dataset.from_dict({"prompt": ["ab"] * PROMPTS}),
        reward_funcs=[_no_reward, _no_reward],
    )


def _no_reward(completions: list[str], **_: Any) -> list[float]:
    raise AssertionError("rewards are given")


class TRL:
    """TRL's numbers for a `Sample`, by its own methods."""

    def __init__(self, trainer: Any, sample: Sample, rollout_correction: bool = False) -> None:
        self.trainer, self.sample = trainer, sample
        # Set late: the constructor would start an engine.
        trainer.use_vllm = rollout_correction
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer._generate = self._generate
        trainer._calculate_rewards = lambda *_: sample.rewards
        trainer.ref_model = REFERENCE

    def score(self) -> dict[str, Tensor]:
        """TRL's generation batch: advantages, old and reference log-probs, importance weights."""
        self.trainer._get_per_token_logps_and_entropies = self._frozen_logps
        inputs = [{"prompt": "ab"} for _ in self.sample.lengths]
        return self.trainer._generate_and_score_completions(inputs)

    def loss(self, inputs: dict[str, Tensor], logp: Tensor) -> Tensor:
        """The trainer's loss of `inputs`, differentiable in `logp`."""
        scored = logp, torch.zeros_like(logp), None
        self.trainer._get_per_token_logps_and_entropies = lambda *_, **__: scored
        return self.trainer._compute_loss(self.trainer.model, inputs)

    def metrics(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self.trainer._metrics["train"].items()}

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids = [[4, 5]] * len(prompts)
        # Those of full length have no EOS: they count as truncated.
        completion_ids = [
            [6] * (length - 1) + [6 if length == MAX_COMPLETION_LENGTH else EOS]
            for length in self.sample.lengths
        ]
        texts = ["c" * length for length in self.sample.lengths]
        if isinstance(self.trainer, RLOOTrainer):
            return prompt_ids, completion_ids, texts
        rollout = [
            row[:length].tolist()
            for row, length in zip(self.sample.rollout_logp, self.sample.lengths, strict=True)
        ]
        return prompt_ids, completion_ids, None, texts, rollout, {}, None, None

    def _frozen_logps(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        logp = self.sample.ref_logp if model is REFERENCE else self.sample.old_logp
        return logp, None, None
