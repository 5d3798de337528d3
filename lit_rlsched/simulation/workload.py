"""Completions to simulate: lengths of a run, a distribution or a file, and waits for tools."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, cycle, islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from lit_rlsched.engines.simulated import SimulatedEngine
from lit_rlsched.rollout.turns import Next
from lit_rlsched.scheduling.trace_files import Traces
from lit_rlsched.settings import MOST, UsageError
from lit_rlsched.simulation.loop import Visit
from lit_rlsched.types import ENVIRONMENT, LengthOnly, Prompt, Sample, stable_hash

PROMPT_TOKENS = 128
"""Tokens of prompts whose lengths are not known."""
BETWEEN = 0.5
"""Share of the variance of log-lengths that lies between prompts, where nothing else is known."""


class Call(NamedTuple):
    """Tokens drawn before a call of tools, tokens of its reply, and seconds until that is there."""

    at: int
    reply: int
    seconds: float


class Length(int):
    """Tokens that a completion draws, with its calls of tools, which share their seconds."""

    calls: Sequence[Call] = ()

    @classmethod
    def of(cls, drawn: int, turns: Sequence[int], seconds: float) -> "Length":
        """Read the columns of a run's traces; replies are negative in `turns`."""
        length, before = cls(drawn), accumulate(max(0, tokens) for tokens in turns)
        replies = [(at, -n) for at, n in zip(before, turns, strict=True) if n < 0]
        length.calls = [Call(*of, seconds / len(replies)) for of in replies]
        return length


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how long their completions are whenever they are drawn.

    After the last prompt the first comes again.
    """

    lengths: Sequence[Sequence[int]]
    """Tokens that each completion of each prompt draws, in the order in which prompts are drawn."""
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

    def next_call(self, sample: Sample) -> Call:
        """Return the next call of a completion, or its end as a call without a reply."""
        length = self.length(sample)
        calls = getattr(length, "calls", ())
        replies = sum(author == ENVIRONMENT for author, _ in sample.completion.segments)
        return calls[replies] if replies < len(calls) else Call(length, 0, 0.0)

    @property
    def calls_tools(self) -> bool:
        """Whether a completion calls tools."""
        return any(getattr(length, "calls", ()) for of in self.lengths for length in of)

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
                calls = row.get("turns") or (), row.get("tool_seconds") or 0.0
                groups.setdefault(name, []).append(Length.of(row["drawn"], *calls))
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


class SimulatedTurns:
    """In place of `rollout.turns.Turns`: completions wait for tools as long as in a run."""

    tools = SimpleNamespace(tool_steps=None)

    def __init__(self, work: Workload, engines: Sequence[SimulatedEngine]) -> None:
        self._work, self._engines = work, engines
        self.pending: dict[str, Sample] = {}
        """Completions that wait."""
        self._due: dict[str, float] = {}
        """When they go on by the engines' clocks, perhaps in a later round."""

    @property
    def due(self) -> float:
        """When the next completion goes on."""
        return min((self._due[name] for name in self.pending), default=math.inf)

    def _now(self) -> float:
        return max(engine.now() for engine in self._engines)

    def rest(self, seconds: float) -> None:
        """Let time pass in which nothing decodes."""
        moment = self._now() + seconds
        for engine in self._engines:
            engine.wait_until(moment)

    def _awaits(self, sample: Sample) -> Call | None:
        """Return the call whose reply is the next that a completion needs."""
        call = self._work.next_call(sample)
        return call if call.reply and call.at == sample.completion.drawn else None

    def begin(self, sample: Sample) -> None:
        call, now = self._awaits(sample), self._now()
        due = self._due.get(sample.id, now + call.seconds) if call else now
        self.pending[sample.id], self._due[sample.id] = sample, due

    def ended(self, sample: Sample, step: int) -> Next | None:
        if self._awaits(sample) is None:
            return "over"
        sample.completion.finish_reason = None
        self.begin(sample)
        return None

    def must_wait(self, step: int, idle: bool) -> bool:
        if idle and self.pending:  # nothing else brings the next reply
            self.rest(self.due - self._now())
        return False

    def poll(self) -> Iterator[tuple[Sample, Next]]:
        now = self._now()
        for engine in self._engines:
            if not engine.stats().running:  # it lags behind the others
                engine.wait_until(now)
        for name in [name for name in self.pending if self._due[name] <= now]:
            sample = self.pending.pop(name)
            completion, call = sample.completion, self._awaits(sample)
            del self._due[name]
            length: Any = LengthOnly(len(completion.token_ids) + (call.reply if call else 0))
            if too_long := len(length) >= self._work.limit:
                completion.finish_reason = "stop"
            elif call is not None:
                completion.token_ids = completion.logprobs = length
                completion.segments.append((ENVIRONMENT, call.reply))
            yield sample, "over" if too_long else "decodes"

    def leave(self, sample: Sample) -> None:
        self.pending.pop(sample.id, None)

    def end_round(self, keep: bool = False) -> None:
        self.pending.clear()

    def _nothing(self, *_: Any) -> dict[str, float]:
        return {}

    begin_round = note_free = metrics = wait = close = _nothing
