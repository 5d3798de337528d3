"""The pool: groups that were drawn from the data and not yet trained on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lit_rlsched.types import Completion, Group, Prompt


class RolloutBuffer:
    """The pool's groups by id, in the order they were drawn.

    A group enters when its prompt is drawn from the data and leaves when it is trained on or
    dropped. In between it survives rounds and checkpoints.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def add(self, group: Group) -> None:
        """Append a newly drawn group."""
        assert group.id not in self._groups, f"group {group.id} is already in the pool"
        self._groups[group.id] = group

    def settle(self, planned: Iterable[Group], left: Iterable[Group]) -> None:
        """Remove a round's `planned` groups, except those in `left`, which keep their places."""
        stay = {group.id: group for group in left}
        for group in planned:
            if group.id in stay:
                self._groups[group.id] = stay[group.id]
            else:
                del self._groups[group.id]

    @property
    def completions(self) -> list[Completion]:
        """All completions, group after group."""
        return [c for group in self for c in group.completions]

    @property
    def tokens(self) -> int:
        """Number of tokens drawn so far of all completions, drafts included."""
        drafts = (c.draft.token_ids if c.draft else () for c in self.completions)
        return sum(len(c.token_ids) for c in self.completions) + sum(map(len, drafts))

    def restart(self) -> int:
        """Reset every completion to its state before the first draw.

        Returns:
            Number of tokens thrown away, drafts included.
        """
        discarded = self.tokens
        for completion in self.completions:
            completion.restart()
            completion.attempts = 0
        return discarded

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors only, for `torch.load(weights_only=True)`."""
        from lit_rlsched.rollout.packing import pack  # imports torch; simulations run without it

        return pack(self)

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[str], Prompt]) -> None:
        """Restore the groups; `prompt` finds a prompt by its uid."""
        from lit_rlsched.rollout.packing import unpack

        self._groups = {group.id: group for group in unpack(state, prompt)}
