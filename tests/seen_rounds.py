"""What tests keep of a run: its rounds, and what a hook saw."""

import copy
import threading

import torch

from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.training.logprobs import completion_logprobs
from lit_rlsched.types import ENVIRONMENT


class Rounds(RolloutCallback):
    """Keeps the rounds, and what the hooks were called with."""

    def __init__(self):
        self.rounds, self.planned, self.completions, self.groups = [], [], [], []
        self.counters, self.steps = [], []

    def on_round_start(self, trainer, pl_module, plan):
        self.planned.append([group.id for group in plan])

    def on_completion_end(self, trainer, pl_module, completion):
        assert threading.current_thread() is threading.main_thread()
        self.completions.append(completion)

    def on_group_end(self, trainer, pl_module, group):
        self.groups.append(group.id)

    def on_round_end(self, trainer, pl_module, round):
        self.rounds.append(round)
        self.counters.append(dict(trainer.datamodule.run.counters))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(batch)

    @property
    def metrics(self):
        return [round.metrics for round in self.rounds]

    @property
    def drawn(self):
        return [
            [
                (g.id, c.index, c.finish_reason, [*c.token_ids], c.segments)
                for g in r.groups
                for c in g.completions
            ]
            for r in self.rounds
        ]


class Policies(Rounds):
    """Keeps the policy of each version, too."""

    def __init__(self):
        super().__init__()
        self.policies = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.policies.setdefault(trainer.global_step, copy.deepcopy(pl_module.model).eval())

    on_train_start = on_train_batch_end

    @torch.no_grad()
    def gaps(self, group, completion):
        """How far the log-prob of each token is from that of the policy of its version."""
        prompt, spans = group.prompt.token_ids, completion.segments
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        sizes = torch.tensor([len(prompt)]), torch.tensor([len(completion.token_ids)])
        found = {
            v: completion_logprobs(self.policies[v], ids, *sizes, temperature=1.0)[0][0]
            for v, _ in spans
            if v != ENVIRONMENT
        }
        versions = [version for version, tokens in spans for _ in range(tokens)]
        drawn = enumerate(zip(completion.logprobs, versions, strict=True))
        return [abs(logp - float(found[v][i])) for i, (logp, v) in drawn if v != ENVIRONMENT]


class At(RolloutCallback):
    """Calls a function whenever one of the hooks is called, and keeps what it returns."""

    def __init__(self, function, *hooks):
        self.seen = []
        for hook in hooks:
            setattr(self, hook, lambda *args, **kwargs: self.seen.append(function(*args, **kwargs)))


def logged(trainer, *_):
    """For `At`: what was logged last."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def gradient_norm(trainer, pl_module, *_):
    """For `At`: of the gradient as the optimizer took it."""
    grads = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
    return float(torch.stack(grads).norm())


def vector(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])
