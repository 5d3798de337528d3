"""Train your own LightningModule, with automatic optimization, on scheduled rollouts.

`Supervised` below is an ordinary module, which learns from demonstrations. `Policy` is the same
module with GRPO: 3 of its lines are replaced by 4. The data module draws the completions and tells
Lightning where each optimizer step ends; all flags of the Trainer work.

    python examples/drop_in.py --rounds 5
"""

import argparse
from collections.abc import Sequence

import torch
from lightning import LightningModule, Trainer
from transformers import AutoModelForCausalLM

from lit_rlsched import RolloutDataModule
from lit_rlsched.callbacks import MicroGroupSampling, RNGState
from lit_rlsched.data import Countdown
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.rewards import countdown_reward
from lit_rlsched.training import completion_logprobs, policy_loss


class Supervised(LightningModule):
    """The module as it was: it imitates demonstrations, batches of `input_ids` and `labels`."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        loss = self.lm(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the loss on held-out demonstrations."""
        self.log("val/loss", self.lm(**batch).loss)

    def configure_optimizers(self):
        """Return an optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95))


class Policy(Supervised):
    """The same module with GRPO."""

    def training_step(self, batch, batch_idx):
        """Return the micro-batch's share of the loss of the optimizer step."""
        logp, _ = completion_logprobs(self.lm, **batch.logprob_inputs)
        loss, metrics = policy_loss(logp, **batch.loss_inputs)
        self.log_dict(metrics, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        """Log the accuracy on held-out prompts."""
        self.log("val/accuracy", batch.metrics()["accuracy"], batch_size=1)


def main(argv: Sequence[str] | None = None) -> None:
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
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    main()
