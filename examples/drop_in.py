"""Train a LightningModule of your own, with automatic optimization, on scheduled rollouts.

`Policy` below knows nothing of rollouts: it is a module as you may have one, with a `training_step`
that returns a loss and a `configure_optimizers`. The data module brings the completions and tells
Lightning where each optimizer step ends; every Trainer flag keeps working.

    python examples/drop_in.py --rounds 5
"""

import argparse

import torch
from lightning import LightningModule, Trainer
from transformers import AutoModelForCausalLM

from lit_rlsched import RolloutDataModule
from lit_rlsched.callbacks import MicroGroupSampling, RNGState
from lit_rlsched.data.tasks import Countdown
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.rewards.functions import countdown_reward
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.losses import policy_loss


class Policy(LightningModule):
    """Any module with one causal language model in it."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def training_step(self, batch, batch_idx):
        """The micro-batch's share of the step's loss."""
        logp, _ = completion_logprobs(
            self.lm, batch.input_ids, batch.prompt_lengths, batch.completion_lengths
        )
        loss, metrics = policy_loss(
            logp,
            batch.advantages,
            batch.completion_mask,
            old_logp=batch.old_logp,
            rollout_logp=batch.rollout_logp,
            step_sequences=batch.step_sequences,
            step_tokens=batch.step_tokens,
        )
        self.log_dict(metrics, batch_size=1)
        return loss

    def validation_step(self, evaluated, batch_idx):
        """Held-out accuracy."""
        self.log("val/accuracy", evaluated.metrics()["accuracy"], prog_bar=True, batch_size=1)

    def configure_optimizers(self):
        """As always."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95))


def main() -> None:
    """Train for a few rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/countdown/model")
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data = RolloutDataModule(
        Countdown("train", size=1000),
        [countdown_reward],
        val_data=Countdown("heldout", size=64),
        val_num_generations=4,
        val_greedy=False,
        engine=VLLMEngine() if args.engine == "vllm" else TransformersEngine(),
        prompts_per_round=16,
        num_generations=8,
        micro_batch_tokens=4096,
        max_completion_length=256,
    )
    trainer = Trainer(
        max_epochs=args.rounds,
        gradient_clip_val=1.0,
        check_val_every_n_epoch=args.rounds,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[RNGState(), MicroGroupSampling(slots=64)],
    )
    trainer.fit(Policy(args.model), datamodule=data)
    figures = trainer.callback_metrics
    print(
        f"drop_in: reward {figures['reward']:.2f}, held-out accuracy "
        f"{figures['val/accuracy']:.2f} after {trainer.global_step} optimizer steps"
    )


if __name__ == "__main__":  # reward workers are processes
    main()
