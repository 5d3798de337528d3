"""An engine and a reward that take any time: what a run draws must not depend on it."""

import random
import time

from lit_rlsched.engines import TransformersEngine


class Sleepy(TransformersEngine):
    """Takes any time for a step."""

    def step(self):
        time.sleep(random.random() * 0.01)
        return super().step()


def slowly():
    """A reward that takes any time; its workers load it by its source alone."""

    def digits(prompts, completions, **kwargs):
        import random
        import time

        time.sleep(random.random() * 0.02)
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    return digits
