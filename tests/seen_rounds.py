"""What tests keep of a run: its rounds, the hooks that were called, counts of completions."""

import copy
import threading
from collections import Counter

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
            [
                (g.id, c.index, [*c.token_ids], c.version_spans)
                for g in r.groups
                for c in g.completions
            ]
            for r in self.rounds
        ]


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Second(RolloutCallback):
    """Keeps the second round, and the policy that its update begins with."""

    def on_round_end(self, trainer, pl_module, round):
        self.completions, self.policy = round.completions, copy.deepcopy(pl_module.model).eval()
        self.prompt = round.groups[0].prompt.token_ids


def cells(policy, prompt, eos, most=8):
    """Probabilities of the likeliest first tokens, each with its likeliest second tokens."""

    def likeliest(ids):
        with torch.no_grad():
            found = policy(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        return {int(token): float(found[token]) for token in found.topk(most).indices}

    expected = {}
    for first, chance in likeliest([*prompt]).items():
        after = {} if first in eos else likeliest([*prompt, first])
        expected |= {(first, second): chance * p for second, p in after.items()}
        expected[first, None] = chance * (1 - sum(after.values()))
    return expected | {(None, None): 1 - sum(expected.values())}


def counted(completions, expected):
    """Number of completions in each cell."""
    counts = Counter()
    for first, *more in (c.token_ids for c in completions):
        pair = first, more[0] if more else None
        pair = pair if pair in expected else (first, None)
        counts[pair if pair in expected else (None, None)] += 1
    return counts
