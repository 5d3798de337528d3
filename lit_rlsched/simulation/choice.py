"""What a choice of prompts saves: tokens for each group with a signal, by success rates.

Success rates stay as they are: nothing is learned from what is drawn.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from lit_rlsched.data.source import DomainSource
from lit_rlsched.scheduling.prompt_choice import Chooser, Rule
from lit_rlsched.scheduling.prompt_statistics import PromptStatistics
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sampling

PILOT = 4
"""Default of `PromptBudget`."""
MOST_ROUNDS = 200
"""Rounds to simulate of a choice."""
CHOICES: dict[str, tuple[Rule, bool]] = {
    "plain, or DynamicSampling()": ("uniform", False),
    f"PromptBudget({PILOT})": ("uniform", True),
    "PromptChoice()": ("skip_solved", False),
    'PromptChoice("thompson")': ("thompson", False),
    f'PromptChoice("thompson"), PromptBudget({PILOT})': ("thompson", True),
}


def read_rates(given: str) -> list[float]:
    """Read success rates: a file with one on each line."""
    try:
        rates = [float(line) for line in Path(given).read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"`--success_rates {given}`: {error}. Give a file with a rate from 0 to 1 on each "
            "line, one for each prompt."
        ) from None
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(f"`--success_rates {given}`: give rates from 0 to 1, one on each line.")
    return rates


def rates_of(traces: Traces | None) -> list[float] | None:
    """Return the success rate of each prompt of a run, or `None` if rewards are not 0 and 1."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in [] if traces is None else traces.rows("completions"):
        if row["reward"] is not None and math.isfinite(row["reward"]):
            rewards[row["uid"]].append(row["reward"])
    known = {reward for of in rewards.values() for reward in of}
    return [fmean(of) for of in rewards.values()] if known and known <= {0.0, 1.0} else None


def tokens_per_signal(
    rates: Sequence[float],
    lengths: Sequence[Sequence[int]],
    prompts_per_round: int,
    num_generations: int,
    rounds: int,
    choice: tuple[Rule, bool],
) -> float:
    """Tokens drawn for each group whose rewards differ; infinite if there is none.

    Prompt `i` has the rate `rates[i]` and the mean of `lengths[i]`, which come again if there are
    fewer of them. Rewards are chance, the same for all choices that draw a prompt as often.
    """
    rule, budget = choice
    prompts = [Prompt(str(i), "", ()) for i in range(len(rates))]
    source = DomainSource(prompts, seed=0, shuffle=True, domain_of=None)
    chooser, statistics = Chooser(rule, target=0.5, explore=0.1, seed=0), PromptStatistics()
    chooser.connect(statistics)
    chooser.warned = True  # of rates that are all 0 or 1 the table says enough
    noise, tokens, signals = np.random.default_rng(0), 0.0, 0
    for number in range(rounds):
        groups, rewards = [], []
        for draw in source.draw(prompts_per_round, chooser=chooser):
            at = int(draw.prompt.uid)
            row = (noise.random(num_generations) < rates[at]).astype(float)
            if budget and np.ptp(row[:PILOT]) == 0:
                row = row[:PILOT]
            mean = float(np.mean(lengths[at % len(lengths)]))
            tokens, signals = tokens + mean * len(row), signals + int(np.ptp(row) > 0)
            completions = [Completion(i) for i in range(len(row))]
            groups.append(Group(draw.key, draw.prompt, Sampling(1), completions))
            rewards.append(row.tolist())
        statistics.observe(number, groups, rewards)
    return tokens / signals if signals else math.inf


def savings(
    rates: Sequence[float],
    lengths: Sequence[Sequence[int]],
    prompts_per_round: int,
    num_generations: int,
) -> list[str]:
    """Return a table of all choices, over as many rounds as draw each prompt ten times, or fewer.

    Raises:
        UsageError: a round has more prompts than there are rates.
    """
    if len(rates) < prompts_per_round:
        raise UsageError(
            f"`--prompts_per_round {prompts_per_round}`: there are success rates of {len(rates)} "
            "prompts. Use that number or less, or give the rates of more prompts."
        )
    rounds = min(MOST_ROUNDS, -(-10 * len(rates) // prompts_per_round))
    shape = prompts_per_round, num_generations, rounds
    found = {
        name: tokens_per_signal(rates, lengths, *shape, of)
        for name, of in CHOICES.items()
        if num_generations > PILOT or not of[1]
    }
    plain, *_ = found.values()
    if plain == math.inf:
        return ["", "No choice of prompts helps: all success rates are 0 or 1."]
    rows = [f"{each:10,.0f} {each / plain:9.2f}  {name}" for name, each in found.items()]
    said = f"Tokens for a group with a signal, with the success rates of {len(rates)} prompts:"
    return ["", said, "    tokens  of plain", *rows]
