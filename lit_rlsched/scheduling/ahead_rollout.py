"""Rounds that are drawn while the round before them is trained on."""

from collections.abc import Sequence
from typing import Literal

from lit_rlsched.types import Group

Correction = Literal["verify", "importance"]
"""How tokens of an earlier policy are used: as drafts, or with importance sampling."""

PARTS = 4
"""Parts in which a round's drafts are verified. Completions cut in one part decode while the
trainer verifies the next."""


FORWARD = 0.25
"""Share of the verification in what the trainer computes in a round, if a pass of its own verifies:
the update has a forward and a backward pass, which takes as long as two."""


def has_drafts(groups: Sequence[Group]) -> bool:
    """Return whether any completion of the groups has a draft."""
    return any(completion.draft for group in groups for completion in group.completions)


def draft_positions(groups: Sequence[Group]) -> int:
    """Return the number of tokens in a forward pass over the groups' drafts, with prompts."""
    drafts = [(group, c.draft) for group in groups for c in group.completions]
    return sum(len(g.prompt.token_ids) + len(d.token_ids) for g, d in drafts if d is not None)


def turns_beside(part: Sequence[Group], groups: Sequence[Group], share: float, slots: int) -> int:
    """Return the decode steps that the engine makes while the trainer verifies a part.

    The next round has about as many tokens as this one, so it takes about as many steps: those of
    its longest draft or, if these are more, of all tokens in all slots. If the verification is a
    share of what the trainer computes in this round, the engine does the same share of the next one
    beside it.
    """
    lengths = [len(c.draft.token_ids) for g in groups for c in g.completions if c.draft]
    total = sum(lengths)
    tokens = sum(len(c.draft.token_ids) for g in part for c in g.completions if c.draft)
    return int(share * tokens * max(max(lengths), total / slots) / total) if total else 0


def verified_together(groups: Sequence[Group]) -> list[list[Group]]:
    """Split groups into `PARTS` of about equal positions, those with the longest drafts first.

    The longer a draft is, the more may be left to decode of its completion. Groups with a
    completion without a draft come first. The part of a group does not change how much of its
    drafts is kept.
    """

    def longest(group: Group) -> float:
        drafts = [c.draft for c in group.completions]
        return max((len(d.token_ids) if d else float("inf") for d in drafts), default=0)

    parts: list[list[Group]] = [[] for _ in range(PARTS)]
    total, before = draft_positions(groups), 0
    for group in sorted(groups, key=longest, reverse=True):
        part = before * PARTS // total if total else 0
        parts[min(part, PARTS - 1)].append(group)  # one without a draft may be the last
        before += draft_positions([group])
    return [part for part in parts if part]


AfterRound = Literal["go_on", "cut"]
"""What happens to these drafts at the end of the round: they go on beside the update
(`AheadRollout`), or stop (`DrainFilling`)."""
