"""Domains of prompts: how many prompts of each one an update has, and whether the data fits."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lit_rlsched.types import Prompt

COLUMN = "domain"
"""The prompts' column that names their domain."""


def quotas(shares: Mapping[str, float] | None, prompts: int) -> dict[str | None, int]:
    """Whole prompts of each domain that add up to `prompts`, by largest remainder.

    Args:
        shares: Of each domain; they add up to 1. `None`: all prompts are of one domain, `None`.
        prompts: Of an update.

    Raises:
        ValueError: a domain would have none.
    """
    if shares is None:
        return {None: prompts}
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


def domain_of(prompt: Prompt) -> str:
    """The prompt's domain."""
    return str(prompt.columns[COLUMN])


def check_domains(prompts: Sequence[Prompt], raced: Mapping[str | None, int], waiting: int) -> None:
    """Refuse prompts without a domain or of another, and domains with too few prompts.

    Args:
        prompts: Of the data set.
        raced: Prompts of each domain in a race.
        waiting: Prompts that may wait for a long round, all of one domain in the worst case.

    Raises:
        ValueError: names a prompt or a domain, and the fix.
    """
    there: Counter[str] = Counter()
    for prompt in prompts:
        if COLUMN not in prompt.columns:
            raise ValueError(
                f"`TailBatching(per_domain=...)` needs a column `{COLUMN}` in `train_data`, "
                f"and the prompt {prompt.uid} has none. Add it, or leave `per_domain` out."
            )
        if (domain := domain_of(prompt)) not in raced:
            raise ValueError(
                f"The prompt {prompt.uid} is of the domain {domain!r}, which "
                f"`TailBatching(per_domain=...)` gives no share: it has "
                f"{sorted(map(str, raced))}. Give it one, or leave its prompts out."
            )
        there[domain] += 1
    for name, n in raced.items():
        if there[str(name)] < (most := n + waiting):
            raise ValueError(
                f"`TailBatching(per_domain=...)` has up to {most} prompts of {name!r} "
                f"waiting, {n} of them in a short round, and `train_data` holds "
                f"{there[str(name)]}. Use a lower share, `prompts_per_round` or `prompt_ratio`."
            )
