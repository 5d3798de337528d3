"""Groups of unequal prompts, for rounds on a tiny model."""

from lit_rlsched.types import Completion, Group, Prompt, Sampling

PROMPTS, GENERATIONS = 6, 3


def plan(limit):
    """Return fresh groups whose completions have at most `limit` tokens."""
    return [
        Group(
            f"{p}@0",
            Prompt(str(p), f"prompt {p}", tuple(4 + (7 * i + p) % 60 for i in range(10 + p))),
            Sampling(limit),
            [Completion(i) for i in range(GENERATIONS)],
        )
        for p in range(PROMPTS)
    ]
