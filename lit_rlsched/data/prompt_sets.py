"""All prompts of a run, tokenised."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.data.source import make_prompts
from lit_rlsched.types import Prompt


@dataclass(frozen=True, slots=True)
class PromptSets:
    """What is trained on and what is held out, each prompt tokenised once."""

    train: list[Prompt]
    held_out: dict[str, list[Prompt]]
    """By stage: `val`, `test`."""

    @property
    def all(self) -> list[Prompt]:
        """Every prompt, those of training first."""
        return self.besides(())

    def besides(self, stages: Collection[str]) -> list[Prompt]:
        """All but what is held out for these stages."""
        held_out = (p for stage, ps in self.held_out.items() if stage not in stages for p in ps)
        return [*self.train, *held_out]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(p.token_ids) for p in self.all)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt."""
        return min(len(p.token_ids) for p in self.all)


def tokenize(
    rows: Mapping[str, list[dict[str, Any]]],
    tokenizer: Any,
    *,
    context: int,
    max_completion_length: int,
    chat_template_kwargs: dict[str, Any] | None,
) -> PromptSets:
    """Tokenise the rows of `train`, `val` and `test`, as many of them as there are.

    Raises:
        ValueError: a prompt and its completion do not fit into the context, or a row is unusable.
    """
    if max_completion_length >= context:
        raise ValueError(
            f"`max_completion_length={max_completion_length}` leaves no room for a prompt in the "
            f"model's context of {context} tokens. Use a smaller one."
        )
    sets = {
        name: make_prompts(
            data,
            tokenizer,
            chat_template_kwargs=chat_template_kwargs,
            max_prompt_length=context - max_completion_length,
        )
        for name, data in rows.items()
    }
    train = sets.pop("train", [])
    known = {p.token_ids for p in train}
    if shared := [p for p in sets.get("val", ()) if p.token_ids in known]:
        rank_zero_warn(
            f"{len(shared)} prompts of `val_data` are in `train_data` too, the first is "
            f"{str(shared[0].text)[:80]!r}: the validation figures are not held out."
        )
    return PromptSets(train, sets)
