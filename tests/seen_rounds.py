"""What tests keep of a run: its rounds and the hooks that were called."""

import threading

import torch

from lit_rlsched.callbacks import RolloutCallback


class Rounds(RolloutCallback):
    """Notes the rounds, and which hooks were called for what."""

    def __init__(self):
        self.rounds, self.planned, self.completions, self.groups = [], [], [], []

    def on_round_start(self, trainer, pl_module, plan):
        self.planned.append([group.id for group in plan])

    def on_completion_end(self, trainer, pl_module, completion):
        assert threading.current_thread() is threading.main_thread()
        self.completions.append(completion)

    def on_group_end(self, trainer, pl_module, group):
        self.groups.append(group.id)

    def on_round_end(self, trainer, pl_module, round):
        self.rounds.append(round)

    @property
    def drawn(self):
        return [
            [(g.id, c.index, [*c.token_ids], c.segments) for g in r.groups for c in g.completions]
            for r in self.rounds
        ]


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])
