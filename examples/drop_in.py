"""Train your own LightningModule, with automatic optimization, on scheduled rollouts.

`Policy` below knows nothing of rollouts. It is an ordinary module with a `training_step` that
returns a loss and with `configure_optimizers`. The data module draws the completions and tells
Lightning where each optimizer step ends; all flags of the Trainer work.

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
    """An ordinary module with one causal language model."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def training_step(self, batch, batch_idx):
        """Return the micro-batch's share of the loss of the optimizer step."""
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
        """Log the accuracy on held-out prompts."""
        self.log("val/accuracy", evaluated.metrics()["accuracy"], prog_bar=True, batch_size=1)

    def configure_optimizers(self):
        """Return an optimizer as in any other module."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95))


def main() -> None:
    """Train for a few rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model, rounds = "Folder or hub name of the model.", "Number of rounds to train for."
    parser.add_argument("--model", default="examples/countdown/model", help=model)
    parser.add_argument(
        "--engine", choices=["vllm", "transformers"], default="vllm", help="Engine that decodes."
    )
    parser.add_argument("--rounds", type=int, default=5, help=rounds)
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


if __name__ == "__main__":  # reward workers are other processes
    main()
