"""Domains of prompts: the quota of each in an update, and a check of the data set."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lit_rlsched.types import Prompt

COLUMN = "domain"
"""The prompts' column that names their domain."""


def quotas(shares: Mapping[str, float] | None, prompts: int) -> dict[str | None, int]:
    """Split `prompts` into whole numbers by domain (largest remainder).

    Args:
        shares: Share of each domain; they add up to 1. `None`: one domain, `None`, for all.
        prompts: Prompts of an update.

    Raises:
        ValueError: a domain would have no prompt.
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
    return str(prompt.columns[COLUMN])


def check_domains(prompts: Sequence[Prompt], raced: Mapping[str | None, int], waiting: int) -> None:
    """Refuse prompts without a domain or of an unknown one, and domains with too few prompts.

    Args:
        prompts: The data set.
        raced: Number of prompts of each domain in a race.
        waiting: Maximum number of prompts that wait for a long round, perhaps all of one domain.

    Raises:
        ValueError: names the prompt or the domain, and the fix.
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
                f"The prompt {prompt.uid} has the domain {domain!r}, to which "
                f"`TailBatching(per_domain=...)` gives no share. Its domains are "
                f"{sorted(map(str, raced))}: add a share, or remove the domain's prompts."
            )
        there[domain] += 1
    for name, n in raced.items():
        if there[str(name)] < (most := n + waiting):
            raise ValueError(
                f"`TailBatching(per_domain=...)` may hold {most} prompts of {name!r} at once, "
                f"{n} of them in a short round, and `train_data` has only {there[str(name)]}. Use "
                "a lower share, `prompts_per_round` or `prompt_ratio`."
            )
