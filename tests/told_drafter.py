"""A drafter that knows what will be drawn, and says so or not."""

from collections.abc import Sequence
from typing import ClassVar

from lit_rlsched.types import stable_hash

BEYOND = (5, 6, 7, 8, 9)
"""Proposed as well, as if a completion went on behind its end."""


class ToldDrafter:
    """Proposes what follows in a text that it was told, as its `mode` says.

    `right`: what will be drawn. `junk`: what will not. `mixed`: fewer tokens than it might, of
    which a fifth are wrong. `nothing`: no tokens.
    """

    mode: ClassVar[str] = "right"
    texts: ClassVar[list[list[int]]] = []
    """Prompts with their completions."""

    @classmethod
    def tell(cls, prompts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]) -> None:
        pairs = zip(prompts, drawn, strict=True)
        cls.texts = [[*prompt, *each, *BEYOND] for prompt, each in pairs]

    def propose(
        self, text: Sequence[int], siblings: Sequence[Sequence[int]], most: int
    ) -> Sequence[int]:
        if self.mode == "nothing":
            return ()
        start = len(text)
        whole = next(each for each in self.texts if each[:start] == [*text])
        right = whole[start : start + most]
        if self.mode == "right":
            return right
        if self.mode == "junk":
            return [token ^ 1 for token in right]
        few = stable_hash("few", *text[-3:], start) % (most + 1)
        wrong = [stable_hash("wrong", *text[-3:], i) % 5 == 0 for i in range(most)]
        return [token ^ w for token, w in zip(right[:few], wrong, strict=False)]
