"""Tail batching with a quota for each domain: who races whom, and how many win."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.types import Prompt

COLUMN = "domain"
"""The prompts' column that names their domain."""


def quotas(shares: Mapping[str, float], prompts: int) -> dict[str | None, int]:
    """Whole prompts of each domain that add up to `prompts`, by largest remainder.

    Args:
        shares: Of each domain; they add up to 1.
        prompts: Of an update.

    Raises:
        ValueError: a domain would have none.
    """
    exact = {domain: share * prompts for domain, share in shares.items()}
    whole: dict[str | None, int] = {domain: math.floor(round(n, 9)) for domain, n in exact.items()}
    by_rest = sorted(exact, key=lambda domain: round(whole[domain] - exact[domain], 9))
    for domain in by_rest[: prompts - sum(whole.values())]:
        whole[domain] += 1
    for name, n in whole.items():
        if not n:
            raise ValueError(
                f"`TailBatching(per_domain={dict(shares)})` leaves no prompt of {name!r} in a "
                f"round of {prompts}. Raise its share, or `prompts_per_round`."
            )
    return whole


class DomainTailRound(TailRound):
    """`TailRound` whose short rounds have a quota for each domain.

    RollPacker's code draws and accepts prompts by domain. Each domain races for itself: a short
    round begins more prompts of each than its quota, and is over once every quota is filled. So a
    domain whose completions are long keeps its share of short rounds, and of each update. What lost
    waits in one queue, and long rounds take the oldest, whatever their domain. Where it races again
    instead, every round has its quotas.

    Args:
        shares: Of each domain in a short round's update; they add up to 1.
        update_prompts: See `TailRound`, for all further arguments too.

    Raises:
        ValueError: a domain has no prompt in an update.
    """

    def __init__(
        self,
        shares: Mapping[str, float],
        update_prompts: int,
        num_generations: int,
        prompt_ratio: float = 1.25,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(update_prompts, num_generations, prompt_ratio, *args, **kwargs)
        self._set_quotas(quotas(shares, update_prompts), prompt_ratio)

    def domain_of(self, prompt: Prompt) -> str:
        """Its column `domain`."""
        return str(prompt.columns[COLUMN])

    def check_domains(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a domain or of another, and domains with too few prompts."""
        there: Counter[str] = Counter()
        for prompt in prompts:
            if COLUMN not in prompt.columns:
                raise ValueError(
                    f"`TailBatching(per_domain=...)` needs a column `{COLUMN}` in `train_data`, "
                    f"and the prompt {prompt.uid} has none. Add it, or leave `per_domain` out."
                )
            if (domain := self.domain_of(prompt)) not in self.quotas:
                raise ValueError(
                    f"The prompt {prompt.uid} is of the domain {domain!r}, which "
                    f"`TailBatching(per_domain=...)` gives no share: it has "
                    f"{sorted(map(str, self.quotas))}. Give it one, or leave its prompts out."
                )
            there[domain] += 1
        for name, raced in self._raced_of.items():
            if there[str(name)] < (most := raced + self.most_deferred):
                raise ValueError(
                    f"`TailBatching(per_domain=...)` has up to {most} prompts of {name!r} "
                    f"waiting, {raced} of them in a short round, and `train_data` holds "
                    f"{there[str(name)]}. Use a lower share, `prompts_per_round` or `prompt_ratio`."
                )
