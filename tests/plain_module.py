"""A LightningModule as a user may have it, for tests of automatic optimization."""

import torch
from lightning import LightningModule

from lit_rlsched.policy import load_policy
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.losses import policy_loss


class Plain(LightningModule):
    """As a user may have it: automatic optimization, no notion of rollouts."""

    def __init__(self, model):
        super().__init__()
        self.lm = load_policy(model)

    def training_step(self, batch, batch_idx):
        logp, _ = completion_logprobs(
            self.lm, batch.input_ids, batch.prompt_lengths, batch.completion_lengths
        )
        return policy_loss(
            logp,
            batch.advantages,
            batch.completion_mask,
            old_logp=batch.old_logp,
            rollout_logp=batch.rollout_logp,
            step_sequences=batch.step_sequences,
            step_tokens=batch.step_tokens,
        ).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
