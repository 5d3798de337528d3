"""Groups of unequal prompts, for rounds on a tiny model."""

from lit_rlsched.types import Completion, Group, Prompt, Sampling

PROMPTS, GENERATIONS = 6, 3


def plan(limit, prompts=PROMPTS, generations=GENERATIONS, prompt_tokens=None):
    """Return fresh groups whose completions have at most `limit` tokens."""
    ids = [[4 + (7 * i + p) % 60 for i in range(prompt_tokens or 10 + p)] for p in range(prompts)]
    return [
        Group(
            f"{p}@0",
            Prompt(str(p), f"prompt {p}", tuple(ids[p])),
            Sampling(limit),
            [Completion(i) for i in range(generations)],
        )
        for p in range(prompts)
    ]
