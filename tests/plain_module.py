"""A LightningModule as a user may have it, for tests of automatic optimization."""

import torch
from lightning import LightningModule

from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.training.losses import policy_loss
from lit_rlsched.training.policy import load_policy


class Plain(LightningModule):
    """As a user may have it: automatic optimization, no notion of rollouts."""

    def __init__(self, model):
        super().__init__()
        self.lm = load_policy(model)

    def training_step(self, batch, batch_idx):
        logp, _ = completion_logprobs(self.lm, **batch.logprob_inputs)
        return policy_loss(logp, **batch.loss_inputs).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
