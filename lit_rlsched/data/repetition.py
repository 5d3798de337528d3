"""One prompt, many completions: where a prompt is repeated, and the way back to its group.

A prompt is repeated as a reference, never as text. This is all of its way:

* `make_prompts` (`data/source.py`) tokenises each prompt once and cuts none.
* `repeat` (here) makes a group of it: `num_generations` completions that refer to one `Prompt`.
* `RolloutController._submit` (`rollout/controller.py`) gives each request the token ids of that one
  `Prompt`; engines that can keep the cache of what requests have in common once.
* `places` (here) is the only way from a flat list of completions to the `[P, G]` layout of rewards
  and advantages: by the group that a completion is in, not by where it is in a list.
* `share_prompts` (`training/micro_batches.py`) puts completions of one group behind one copy of the
  prompt in the update, where that saves work.

A public attempt at this repeated prompts as strings, and two things went wrong there. It repeated
them interleaved (p0, p0, p1, p1) while the leave-one-out baseline still reshaped for the tiled
order (p0, p1, p0, p1), so that prompts were compared with each other's completions. And it
tokenised the copies again with a `max_length` nobody had set: the memory it saved was the prompts
it had cut.
"""

from collections.abc import Sequence

from lit_rlsched.types import Completion, Group, Prompt, Sampling


def repeat(prompt: Prompt, num_generations: int, key: str, sampling: Sampling) -> Group:
    """A group of completions that are yet to be drawn.

    Args:
        prompt: All completions refer to it; nothing of it is copied.
        num_generations: Completions.
        key: Names the group.
        sampling: How they are drawn.
    """
    return Group(key, prompt, sampling, [Completion(i) for i in range(num_generations)])


def places(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Row and column in a matrix `[P, G]` of every completion, group after group.

    The row is the group's place in the list, the column the completion's own `index`, so that it
    does not matter which completions of a group are there, nor in which order.
    """
    return [(row, c.index) for row, group in enumerate(groups) for c in group.completions]
