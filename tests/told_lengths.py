"""A predictor of lengths that says what it is told to say, and completions to ask it about."""

import numpy as np

from lit_rlsched.types import Completion, Group, Prompt, Sample, Sampling

CAP = 100


def asked(lengths, number=0, drawn=0):
    """One group a length, nothing of it drawn unless `drawn`."""
    return [
        Sample(Group(f"p{i}/{number}", Prompt(f"p{i}", "", (i,)), Sampling(CAP), [c]), c)
        for i in range(len(lengths))
        for c in [Completion(0, [1] * drawn)]
    ]


def finish(samples, lengths):
    for sample, length in zip(samples, lengths, strict=True):
        sample.completion.token_ids = [1] * length
        sample.completion.finish_reason = "length" if length == CAP else "stop"
    return samples


class Told:
    """Says what it is told to say."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def predict(self, samples):
        return self.answers.pop(0)

    def observe(self, samples):
        self.observed = len(samples)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


LENGTHS = [int(n) for n in np.linspace(5, 95, 64)]
