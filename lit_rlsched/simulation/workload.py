"""Lengths of completions to simulate: of a run, a distribution or a file."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean

import numpy as np

from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import MOST, UsageError
from lit_rlsched.simulation.loop import Visit
from lit_rlsched.types import LengthOnly, Prompt, Sample, stable_hash

PROMPT_TOKENS = 128
"""Tokens of prompts whose lengths are not known."""
BETWEEN = 0.5
"""Share of the variance of log-lengths that lies between prompts, where nothing else is known."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how long their completions are whenever they are drawn.

    After the last prompt the first comes again.
    """

    lengths: Sequence[Sequence[int]]
    """Tokens of each completion of each prompt, in the order in which prompts are drawn."""
    prompt_tokens: Sequence[int]
    limit: int
    """`max_completion_length`, which cuts them."""

    def __post_init__(self) -> None:
        if not self.lengths or not all(self.lengths):
            raise UsageError("There is no prompt with completions. Give at least one.")
        for number, of in enumerate(self.lengths):
            if min(of) < 1:
                raise UsageError(
                    f"A completion of prompt {number} (the first is 0) has the length {min(of)}. "
                    "Use 1 or more: the token that ends it counts."
                )

    def visits(self) -> Iterator[Visit]:
        """Yield the prompts, again and again."""
        prompts = [
            Prompt(str(i), "", LengthOnly(tokens))  # type: ignore[arg-type]
            for i, tokens in enumerate(self.prompt_tokens)
        ]
        for visit in count():
            yield from (Visit(prompt, f"{prompt.uid}@{visit}") for prompt in prompts)

    def length(self, sample: Sample) -> int:
        """Return the length of a completion.

        Where more are drawn than are known, one of the known lengths comes again.
        """
        of, index = self.lengths[int(sample.group.prompt.uid)], sample.completion.index
        return of[index] if index < len(of) else of[stable_hash(sample.id) % len(of)]

    def mean_length(self, prompts: int, num_generations: int) -> float:
        """Return the mean length of the completions of the first prompts."""
        groups = (of[:num_generations] for of in islice(cycle(self.lengths), prompts))
        return fmean(fmean(min(n, self.limit) for n in of) for of in groups)

    def shuffled(self, seed: int) -> "Workload":
        """Return the prompts in another order: a schedule may have sorted them by length."""
        order = np.random.default_rng(seed).permutation(len(self.lengths)).tolist()
        lengths = [self.lengths[i] for i in order]
        return replace(self, lengths=lengths, prompt_tokens=[self.prompt_tokens[i] for i in order])

    @classmethod
    def of_run(cls, traces: Traces) -> "Workload":
        """Take the completions of a run, prompts in the order in which they were trained on."""
        groups: dict[str, list[int]] = {}
        prompts: dict[str, int] = {}
        for row in traces.rows("completions"):
            if row["drawn"]:
                name = row["request"].rpartition("/")[0]
                groups.setdefault(name, []).append(row["drawn"])
                prompts[name] = row["prompt_tokens"]
        if not groups:
            raise UsageError(
                f"`{traces.folder}` has no completion that has ended. Give a run with whole rounds."
            )
        limit = traces.about["max_completion_length"]
        return cls([*groups.values()], [*prompts.values()], limit)

    @classmethod
    def of_file(cls, path: str | Path, limit: int | None = None) -> "Workload":
        """Read a file with a line for each prompt: its lengths, separated by commas."""
        lengths: list[list[int]] = []
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"`{path}` cannot be read: {error}.") from None
        for number, line in enumerate(lines, start=1):
            try:
                of = [int(cell) for cell in line.split(",") if cell.strip()]
                if of and not 1 <= min(of) <= max(of) <= MOST:
                    raise ValueError(f"a length is {min(of)}")
            except ValueError as error:
                raise UsageError(
                    f"`{path}`, line {number}: {line!r:.80} has not only lengths ({error}). Use "
                    "whole numbers of tokens, 1 or more (the token that ends a completion counts), "
                    "separated by commas: those of one prompt's completions in each line."
                ) from None
            lengths += [of] if of else []
        longest = max((n for of in lengths for n in of), default=1)
        return cls(lengths, [PROMPT_TOKENS] * len(lengths), limit or longest)

    @classmethod
    def lognormal(
        cls,
        median: float,
        sigma: float,
        limit: int,
        prompts: int,
        num_generations: int,
        between: float = BETWEEN,
        seed: int = 0,
    ) -> "Workload":
        """Draw log-normal lengths."""
        chance = np.random.default_rng(seed)
        of_prompt = chance.normal(size=(prompts, 1)) * math.sqrt(between)
        own = chance.normal(size=(prompts, num_generations)) * math.sqrt(1 - between)
        lengths = np.ceil(median * np.exp(sigma * (of_prompt + own))).clip(1, limit)
        return cls(lengths.astype(int).tolist(), [PROMPT_TOKENS] * prompts, limit)
