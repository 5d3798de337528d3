"""The values that travel between layers."""

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-sequence token was drawn and kept. `length`: cut at the limit."""


class LengthOnly(Sequence[Any]):
    """A sequence of tokens or log-probs of which only the length is known; each item reads as 0.

    A simulation draws these: a hundred million tokens take no memory.
    """

    __slots__ = ("_length",)

    def __init__(self, length: int = 0) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return repeat(0, self._length)

    def __getitem__(self, at: Any) -> Any:
        places = range(self._length)[at]
        return LengthOnly(len(places)) if isinstance(places, range) else 0

    def __add__(self, more: Sequence[Any]) -> "LengthOnly":
        return LengthOnly(self._length + len(more))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LengthOnly) and len(other) == self._length

    def __hash__(self) -> int:
        return hash((LengthOnly, self._length))


def stable_hash(*parts: object) -> int:
    """63-bit hash of `parts`, the same in every process and on every platform."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the user's data set, tokenised once and repeated by reference."""

    uid: str
    """Stable name: the row's `uid` column, or a hash of the row."""
    text: str | list[dict[str, str]]
    """A string, or chat messages as `data.messages.normalized` returns them."""
    token_ids: tuple[int, ...]
    """The tokenised string, or the messages through the chat template."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, which reward functions get as keyword arguments."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a completion is drawn. `temperature=0` is greedy."""

    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion for the engine to draw or to resume."""

    id: str
    """Unique among the requests an engine holds."""
    prompt_ids: Sequence[int]
    seed: int
    sampling: Sampling
    prefix_ids: Sequence[int] = ()
    """Tokens drawn earlier, to resume from; they count towards `sampling.max_completion_length`."""
    pause_at: int | None = None
    """Completion length, prefix included, at which the engine pauses the request with the finish
    reason `length`, although its sampling allows more. Submitted again with the same id and seed
    and all tokens so far as its prefix, it draws what it would have drawn without the pause."""
    expected: float | None = None
    """Predicted number of tokens that it will still draw."""
    waits: float = 0.0
    """Predicted number of decode steps for which its tools run, for each token that it draws."""
    later: bool = False
    """Whether it takes a slot only if no other request waits for one."""
    returns: bool = False
    """Whether it comes back from its environment, so that an engine may still have its cache."""

    @property
    def group(self) -> str:
        """Id of its group; see `Sample.id`."""
        return self.id.rpartition("/")[0]

    @property
    def limit(self) -> int:
        """Completion length at which the engine stops, prefix included."""
        most = self.sampling.max_completion_length
        return most if self.pause_at is None else min(most, self.pause_at)


@dataclass(slots=True)  # not frozen: creation would take three times as long, for each token
class Event:
    """New tokens of one request since its last event."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each new token under the distribution it was drawn from (after temperature and
    truncation); for greedy decoding, under the distribution at temperature 1."""
    finish_reason: FinishReason | Literal["paused"] | None = None
    """`paused`: stopped at the request's `pause_at` (set by the worker; engines say `length`)."""
    version: int = field(init=False, repr=False, compare=False)
    """Policy version of the weights that drew the tokens; set by the worker."""


ENVIRONMENT = -1
"""Author of tokens that no policy has drawn, such as the reply of a tool."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens of a completion, for a newer policy to verify."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each token under the policy that drew it."""
    segments: Sequence[tuple[int, int]]
    """`(author, number of tokens)` in order, as those of a completion."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the policies that drew it, in order."""
        return tuple(dict.fromkeys(v for v, _ in self.segments if v != ENVIRONMENT))

    def kept(self, tokens: int, version: int) -> list[tuple[int, int]]:
        """Return the segments of its first tokens once they are a policy version's own."""
        found: list[tuple[int, int]] = []
        for author, length in self.segments:
            length = min(length, tokens)
            tokens -= length
            by = ENVIRONMENT if author == ENVIRONMENT else version
            if found and found[-1][0] == by:
                found[-1] = by, found[-1][1] + length
            elif length:
                found.append((by, length))
        return found


def no_ids() -> "array[int]":
    """Make an array for token ids: 4 bytes each, where a list takes 36."""
    return array("i")


def no_floats() -> "array[float]":
    """Make an array for log-probs: 8 bytes each, where a list takes 32."""
    return array("d")


@dataclass(slots=True)
class Completion:
    """One answer to a prompt, finished or not.

    Tokens take 12 bytes each: an int32 and, because engines give log-probs as Python floats, a
    float64. Sequences of other types that the constructor gets become such arrays.
    """

    index: int
    """Place in its group: 0 to `num_generations - 1`."""
    token_ids: "array[int]" = field(default_factory=no_ids)
    logprobs: "array[float]" = field(default_factory=no_floats)
    """Log-prob of each token under the policy that drew it."""
    segments: list[tuple[int, int]] = field(default_factory=list)
    """`(author, number of tokens)` in order; the numbers add up to `len(token_ids)`. The author is
    the version of the policy that drew them, or `ENVIRONMENT`."""
    finish_reason: FinishReason | None = None
    text: str = ""
    scores: list[float | None] | None = None
    """One per reward function, `None` where it gave no score; unset until scored."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values that reward functions passed to `log_extra`: columns of the completions table."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Values that reward functions passed to `log_metric`."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Its turns and the replies of tools as chat messages, if it may call tools."""
    observation: str = ""
    """What `reset` of its environment has returned: the end of its prompt."""
    waited: int = 0
    """Decode steps that passed while its tools ran."""
    environment_state: str = field(default="", repr=False)
    """State of its environment after the last reply, if it gives one."""
    given: dict[int, Any] = field(default_factory=dict)
    """Results of reward functions that were called with its environment, by number."""
    tool_seconds: float = field(default=0.0, compare=False)
    """Seconds for which it waited for its tools; not in checkpoints."""
    reward_seconds: float = field(default=0.0, compare=False)
    """Duration of the calls of reward functions, one after the other; not in checkpoints."""
    failure: str | None = field(default=None, compare=False)
    """The first reward function that failed, and its error; not in checkpoints."""
    dropped: str | None = None
    """Why it is not trained on: the name of a counter, such as `nonfinite_logprob`."""
    advantage: float = 0.0
    old_logprobs: "array[float] | None" = None
    """Log-prob of each token by the trainer's forward pass under the weights of the round."""
    ref_logprobs: "array[float] | None" = None
    attempts: int = 0
    """Number of times that its tokens were discarded."""
    draft: Draft | None = None
    """Tokens to verify before it is drawn further, while a round begins."""

    def __post_init__(self) -> None:
        for name, typecode in _ARRAYS:
            values = getattr(self, name)
            if isinstance(values, list | tuple):
                setattr(self, name, array(typecode, values))

    @property
    def shown(self) -> str | list[dict[str, Any]]:
        """What its reader sees: its text, or its messages if it may call tools."""
        return self.messages or self.text

    def take(self, event: Event, version: int) -> None:
        """Append an event's tokens, drawn under policy `version`."""
        if new := event.token_ids:
            if new.__class__ is LengthOnly:
                length: Any = LengthOnly(len(self.token_ids) + len(new))
                self.token_ids = self.logprobs = length
            else:
                self.token_ids.extend(new)
                self.logprobs.extend(event.logprobs)
            spans = self.segments
            last, tokens = spans[-1] if spans else (None, 0)
            if last == version:
                spans[-1] = version, tokens + len(new)
            else:
                spans.append((version, len(new)))
        if event.finish_reason is not None and event.finish_reason != "paused":
            self.finish_reason = event.finish_reason

    def take_reply(self, token_ids: Sequence[int]) -> None:
        """Append tokens of an environment. Their log-probs are 0, and nothing trains on them."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.segments.append((ENVIRONMENT, len(token_ids)))

    def restart(self) -> None:
        """Discard everything drawn so far."""
        blank = Completion(self.index, attempts=self.attempts + bool(self.token_ids))
        for name in self.__slots__:
            setattr(self, name, getattr(blank, name))

    def put_off(self) -> None:
        """Move the tokens into `draft`, and reset."""
        draft, attempts = Draft(self.token_ids, self.logprobs, self.segments), self.attempts
        self.restart()
        self.draft, self.attempts = draft, attempts

    def copy(self) -> "Completion":
        """Return a copy to which tokens can be added without changing this one."""
        new = object.__new__(type(self))  # without `__init__`: rounds copy all their completions
        for name in self.__slots__:
            setattr(new, name, getattr(self, name))
        for name in ("token_ids", "logprobs", "segments", "messages"):
            setattr(new, name, getattr(self, name)[:])
        return new

    def staleness(self, version: int) -> int:
        """Number of policy versions between its first token and `version`."""
        authors = (author for author, _ in self.segments if author != ENVIRONMENT)
        return version - next(authors, version)

    @property
    def own_ids(self) -> Sequence[int]:
        """TRL's `completion_ids`: its tokens without those that an environment has begun it with.

        These are the end of the prompt.
        """
        author, tokens = self.segments[0] if self.segments else (None, 0)
        return self.token_ids[tokens:] if author == ENVIRONMENT else self.token_ids

    @property
    def drawn(self) -> int:
        """Number of tokens that policies have drawn, without those of an environment."""
        drawn = len(self.token_ids)
        for author, tokens in self.segments:
            if author == ENVIRONMENT:
                drawn -= tokens
        return drawn

    def mask(self, version: int | None = None) -> list[float]:
        """Return 1 for each token that a policy has drawn, or that of `version`; 0 for others."""
        if version is None and self.drawn == len(self.token_ids):
            return [1.0] * len(self.token_ids)
        return [
            float(author != ENVIRONMENT and version in (None, author))
            for author, tokens in self.segments
            for _ in range(tokens)
        ]

    @property
    def finished(self) -> bool:
        """Whether all its tokens are drawn."""
        return self.finish_reason is not None

    @property
    def scored(self) -> bool:
        """Whether the reward functions have returned."""
        return self.scores is not None

    @property
    def correct(self) -> bool:
        """Whether the first reward function gave 1.0 or more."""
        return self.scores is not None and (self.scores[0] or 0.0) >= 1.0


_ARRAYS = (("token_ids", "i"), ("logprobs", "d"), ("old_logprobs", "d"), ("ref_logprobs", "d"))
"""Arrays of a completion, with their type codes."""


@dataclass(slots=True)
class Group:
    """One prompt and its completions: the unit of GRPO's and RLOO's baseline."""

    id: str
    """Unique in the pool: the prompt's uid and the pass over the data that drew it."""
    prompt: Prompt
    sampling: Sampling
    completions: list[Completion]
    """Completions not yet trained on."""
    deferred: int = 0
    """Number of rounds that deferred it."""
    overtaken: int = 0
    """Number of later prompts that were trained on before it, if the rule counts them."""

    def copy(self) -> "Group":
        """Return a copy with copies of the completions."""
        return replace(self, completions=[c.copy() for c in self.completions])

    @property
    def complete(self) -> bool:
        """Whether every completion is finished and scored."""
        return all(c.scored for c in self.completions)

    def begun(self, first: int) -> bool:
        """Return whether a completion from index `first` on has begun."""
        return any(c.token_ids or c.finished for c in self.completions[first:])


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion with its group."""

    group: Group
    completion: Completion

    @property
    def id(self) -> str:
        """Id of its request and of its spans in a trace."""
        return f"{self.group.id}/{self.completion.index}"

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """TRL's `prompts` of one completion: what `reset` has returned ends the last message."""
        prompt, observation = self.group.prompt.text, self.completion.observation
        if not observation or isinstance(prompt, str):
            return prompt
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return [*self.group.prompt.token_ids, *self.completion.token_ids]

    def __len__(self) -> int:
        return len(self.group.prompt.token_ids) + len(self.completion.token_ids)
