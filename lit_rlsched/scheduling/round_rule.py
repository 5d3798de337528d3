"""The interface of round rules: which prompts a round decodes, when it ends, what remains."""

import math
import sys
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group, Prompt, Sample


@dataclass(slots=True)
class RoundState:
    """What a rule may look at while a round decodes.

    Only rules that race look at scores. For all others the end of a round does not depend on how
    long reward functions take, but on seeds and schedule alone.
    """

    planned: list[Group]
    decoded: list[Group] = field(default_factory=list)
    """Groups whose completions are all decoded, by the step in which that happened, then in the
    order of the pool."""
    completions_decoded: int = 0
    finished: dict[str, list[Completion]] = field(default_factory=dict)
    """Decoded completions of each group, in the same order."""
    stopped: dict[str, list[Completion]] = field(default_factory=dict)
    """Completions that were removed from each group because it had `enough`."""
    patient: bool = False
    """Whether the round still waits for the scores of the groups decoded first."""
    waiting: set[str] = field(default_factory=set)
    """Ids of groups that only use free slots; see `RoundRule.waiting`."""
    final: int = 0
    """Length of the prefix of `decoded` whose order is final: the groups of earlier steps."""
    undecoded: dict[str, int] = field(default_factory=dict)
    """Number of completions of each group that still decode."""
    decoded_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Decode step in which the last completion of a group was decoded, and the group's place."""
    place: dict[str, int] = field(default_factory=dict)
    """Place of each group among those that are planned."""

    @classmethod
    def begin(cls, groups: Sequence[Group], rule: "RoundRule") -> "RoundState":
        """The state of a round that begins with these groups."""
        waiting = {group.id for group in rule.waiting(groups)}
        state = cls([], patient=rule.patience is not None, waiting=waiting)
        for group in groups:
            state.add(group)
        return state

    @property
    def due(self) -> list[Group]:
        """The groups that do not only use free slots."""
        return [group for group in self.planned if group.id not in self.waiting]

    def waits(self, sample: Sample) -> bool:
        """Return whether a completion only uses a free slot in this round."""
        return sample.group.id in self.waiting

    def add(self, group: Group) -> None:
        """Add a group to the round, in the last place."""
        self.planned.append(group)
        self.undecoded[group.id] = len(group.completions)
        self.place[group.id] = len(self.place)

    def count(self, sample: Sample, step: int) -> None:
        """Record that a completion needs no more decoding, as of a decode step."""
        name = sample.group.id
        self.undecoded[name] -= 1
        self.completions_decoded += 1
        if sample.completion.finished:
            self.finished.setdefault(name, []).append(sample.completion)
        if not self.undecoded[name]:
            self.decoded_at[name] = step, self.place[name]
            insort(self.decoded, sample.group, key=lambda group: self.decoded_at[group.id])

    def keep(self, group: Group, kept: list[Completion]) -> None:
        """Take all completions but `kept` out of a group that was stopped."""
        chosen = {c.index for c in kept}
        others = [c for c in group.completions if c.index not in chosen]
        self.stopped.setdefault(group.id, []).extend(others)
        group.completions = kept

    def in_order(self, samples: Iterable[Sample]) -> list[Sample]:
        """Sort completions by the place of their group, and in it."""
        return sorted(samples, key=lambda s: (self.place[s.group.id], s.completion.index))


class RoundRule(ABC):
    """Decides the course of a round.

    It chooses the prompts that the round decodes, when the round ends, and what happens to the
    rest. Rules have no side effects.
    """

    update_prompts: int
    """Prompts that a round trains on, unless fewer are left or more finish in the same step."""
    max_staleness: int | None = 0
    """Maximum number of policy versions between a completion's first token and the round. An older
    completion is restarted. 0: all tokens of a round have one version; `None`: no limit."""
    verifies_from: int | None = None
    """A completion whose first token is at least this many policy versions old is verified when the
    round begins: it keeps what the newest policy would have drawn. `None`: never."""
    most_deferred = 0
    """Maximum number of prompts that wait in the pool beside those of a round."""
    ends_early = False
    """Whether rounds may end before all planned completions are decoded."""
    stops_groups = False
    """Whether a group may have `enough` while some of its completions still decode."""
    reorders = False
    """Whether a group may be decoded and scored and wait for a later round all the same. Hooks are
    called with it in the round that trains on it."""
    has_domains = False
    """Whether `domain_of` may differ between prompts."""
    patience: float | None = None
    """Longest time per round, in seconds, to wait for the scores of the groups decoded first. After
    that, later groups may take their places. `None`: the end does not depend on scores."""

    @property
    def off_policy(self) -> bool:
        """Whether a round may train on tokens of earlier policies."""
        return self.ends_early and self.max_staleness != 0

    @property
    def keeps_unfinished(self) -> bool:
        """Whether unfinished completions keep their tokens for the next round."""
        return self.max_staleness != 0 or self.verifies_from is not None

    @abstractmethod
    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        """Number of prompts to draw from the data, given the groups in the pool."""

    def draws(self, pool: Sequence[Group]) -> list[tuple[str | None, int]]:
        """The same number by domain; `None` stands for any domain."""
        return [(None, self.fresh_prompts(pool))]

    def domain_of(self, prompt: Prompt) -> str | None:
        """The domain whose quota a prompt counts towards; `None` without quotas."""
        return None

    def check_domains(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027
        """Refuse a data set whose domains do not fit the quotas."""

    def reach(self, rounds: int) -> int:
        """Prompts that are worth to have in the pool if training ends after so many rounds."""
        return sys.maxsize

    def waiting(self, planned: Sequence[Group]) -> Sequence[Group]:
        """Groups that only use free slots in this round, and are trained on in a later one.

        They are not scored, and nothing that they say stops, replaces or teaches anything.
        """
        return ()

    def is_long(self, planned: Sequence[Group]) -> bool:
        """Whether this round waits for prompts that were deferred by earlier ones."""
        return False

    def metrics(self, planned: Sequence[Group]) -> dict[str, float]:
        """Metrics of this round."""
        return {}

    def launched(self, num_generations: int) -> int:
        """Number of completions to start for a fresh prompt."""
        return num_generations

    def enough(self, group: Group, state: RoundState) -> list[Completion] | None:
        """The completions to train on if the group needs no more; else `None`."""
        return None

    def awaits(self, state: RoundState) -> bool:
        """Whether only missing scores keep the round, or a group, from ending."""
        return False

    @abstractmethod
    def most_prompts(self) -> int:
        """Maximum number of prompts that a round decodes."""

    def slot_prompts(self) -> int:
        """Prompts whose completions all have a slot, where `MicroGroupSampling` sets none."""
        return self.most_prompts()

    def check_enough(self, prompts: int) -> None:
        """Refuse a data set of so many prompts that it cannot fill a round."""
        if prompts < self.update_prompts:
            raise UsageError(
                f"`prompts_per_round={self.update_prompts}` is more than `train_data` holds: "
                f"{prompts} prompts. Use {prompts} or fewer."
            )

    @abstractmethod
    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        """The groups that this round decodes, in the order of the pool."""

    def ends_cycle(self, planned: Sequence[Group], left: Sequence[Group]) -> bool:
        """Whether this round ends a cycle, over which `pool/*` metrics are collected.

        `left` are the groups in the pool after it.
        """
        return not left

    @abstractmethod
    def done(self, state: RoundState) -> bool:
        """Whether the round may end; asked after each step while completions still decode.

        It waits for `update_prompts` groups, if there are so many. Only finished completions have
        the same tokens on every engine at this point: a simulated one tells them at the end.
        """

    def final_groups(self, state: RoundState) -> Sequence[Group]:
        """Groups that are certain of a place in this update, in final order.

        A group may still drop out, if its scores show that nothing of it can be trained on. None is
        overtaken by a new one once all groups before it are scored.
        """
        return state.decoded[: state.final]

    def split(self, groups: Sequence[Group], state: RoundState) -> tuple[list[Group], list[Group]]:
        """Split the round's groups into those to train on and those that stay in the pool."""
        return list(groups), []


class FullRound(RoundRule):
    """Decode all planned prompts before training on any: plain synchronous GRPO.

    Args:
        prompts_per_round: Prompts of a round.
    """

    def __init__(self, prompts_per_round: int) -> None:
        self.update_prompts = prompts_per_round

    def fresh_prompts(self, pool: Sequence[Group]) -> int:
        return max(0, self.update_prompts - len(pool))

    def most_prompts(self) -> int:
        return self.update_prompts

    def plan(self, pool: Sequence[Group]) -> Sequence[Group]:
        return pool[: self.update_prompts]

    def done(self, state: RoundState) -> bool:
        return False


def at_least(ratio: float, n: int) -> int:
    """Round `ratio * n` up, ignoring errors of floating-point arithmetic."""
    return math.ceil(round(ratio * n, 6))
