"""Sources of prompts: cursors over the data that a checkpoint can restore."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_rlsched.settings import UsageError
from lit_rlsched.types import Prompt, stable_hash

if TYPE_CHECKING:
    from lit_rlsched.scheduling.prompt_choice import Chooser


class Draw(NamedTuple):
    """A prompt with the number of the pass over the data in which it was drawn.

    One that was chosen has a `c` and the number of prompts drawn before it in place of the pass.
    """

    prompt: Prompt
    epoch: int | str

    @property
    def key(self) -> str:
        """Unique name of this draw; the next one has another key for the prompt."""
        return f"{self.prompt.uid}@{self.epoch}"


class PromptSource:
    """A cursor over prompts: every prompt once per pass, each pass in a different order.

    The order of a pass depends on the seed and the number of the pass only, so the state is a few
    numbers whatever the size of the data set. A draw that reaches the end of a pass continues with
    the next one and skips the prompts it already has; skipped prompts come first in the next draw.

    Args:
        prompts: Prompts with different uids, as `make_prompts` returns them.
        seed: Seed of the order.
        shuffle: Whether to shuffle; False keeps the order of the data set in every pass.
        multiple: A pass has a multiple of this number of prompts; others of it are left out.

    Example:
        >>> source = PromptSource([Prompt("a", "?", (1,)), Prompt("b", "!", (2,))], seed=0)
        >>> sorted(prompt.uid for prompt, epoch in source.draw(2))
        ['a', 'b']
        >>> source.state_dict()["epoch"]
        1
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, multiple: int = 1
    ) -> None:
        self.prompts = prompts if hasattr(prompts, "uids") else list(prompts)
        uids = getattr(prompts, "uids", None) or [prompt.uid for prompt in self.prompts]
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        """Number of the pass that the next prompt comes from."""
        self.offset = 0
        """Position in the order of this pass."""
        self.drawn = 0
        """Prompts drawn so far."""
        self._deferred: list[tuple[int, int]] = []
        """Skipped prompts: index and pass."""
        self._pass = len(self.prompts) // multiple * multiple
        self._indices = {uid: index for index, uid in enumerate(uids)}
        self._fingerprint = f"{len(uids)} prompts, {stable_hash(*uids):016x}"

    def __len__(self) -> int:
        return len(self.prompts)

    def __contains__(self, uid: str) -> bool:
        return uid in self._indices

    def draw(
        self,
        n: int,
        besides: Collection[str] = (),
        domain: str | None = None,
        chooser: "Chooser | None" = None,
    ) -> list[Draw]:
        """Take `n` prompts, all different, and none with a uid in `besides`.

        They are the next ones, or, but for a share, those that `chooser` chooses.

        Raises:
            UsageError: there are fewer than `n` such prompts.
        """
        most = len(self) if self.shuffle else self._pass
        if not 0 <= n <= most - len(besides):
            raise UsageError(
                f"`prompts_per_round={n + len(besides)}`: a round draws each prompt at most once, "
                f"and there are {most}. Use {most} or less, or a larger data set."
            )
        drawn: list[tuple[int, int | str]] = []
        taken = {self._indices[uid] for uid in besides}
        before, self.drawn = self.drawn, self.drawn + n
        explored = n if chooser is None else chooser.explored(before, n)
        while len(drawn) < explored:
            index, epoch = self._next(taken)
            taken.add(index)
            drawn.append((index, epoch))
            if self.offset >= self._pass and not self._deferred:
                self.epoch, self.offset = self.epoch + 1, 0
        if chooser is not None and explored < n:
            chosen = chooser.choose([*self._indices], taken, n - explored, domain, before)
            drawn += [(index, f"c{before}") for index in chosen]
        return [Draw(self.prompts[index], epoch) for index, epoch in drawn]

    def _next(self, taken: set[int]) -> tuple[int, int]:
        """Index and pass of the next prompt that is not in `taken`."""
        for position, (index, _) in enumerate(self._deferred):
            if index not in taken:
                return self._deferred.pop(position)
        order = self.order(self.epoch)
        for index in map(int, order[self.offset :]):
            self.offset += 1
            if index not in taken:
                return index, self.epoch
            self._deferred.append((index, self.epoch))
        self.epoch, self.offset = self.epoch + 1, 0
        return self._next(taken)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Indices of `prompts` in the order of one pass."""
        return _order(len(self), self.seed if self.shuffle else None, epoch)[: self._pass]

    def state_dict(self) -> dict[str, Any]:
        """The position, and a fingerprint of the prompts and their order."""
        position = {
            name: getattr(self, name) for name in ("epoch", "offset", "drawn", "seed", "shuffle")
        }
        return position | {"deferred": [*self._deferred], "fingerprint": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; one in other prompts, or in another order of them, is refused."""
        if state["fingerprint"] != self._fingerprint:
            raise UsageError(
                f"The checkpoint was made with another data set ({state['fingerprint']}) than this "
                f"one ({self._fingerprint}). Resume with the same prompts in the same order, or "
                "start a new run from the weights alone."
            )
        for name in ("seed", "shuffle"):
            if state[name] != (ours := getattr(self, name)):
                raise UsageError(
                    f"The checkpoint was made with `{name}={state[name]}`, this run has `{name}="
                    f"{ours}`: the order of the prompts would change within a pass. "
                    f"Resume with `{name}={state[name]}`."
                )
        self.epoch, self.offset, self.drawn = (int(state[n]) for n in ("epoch", "offset", "drawn"))
        self._deferred = [(int(index), int(epoch)) for index, epoch in state["deferred"]]


class DomainSource:
    """One `PromptSource` per domain."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        shuffle: bool,
        domain_of: Callable[[Prompt], str | None] | None,
        multiple: int = 1,
    ) -> None:
        parts: dict[str | None, Sequence[Prompt]] = {None: prompts}
        if domain_of is not None:
            positions: dict[str | None, list[int]] = {}
            for position, prompt in enumerate(prompts):
                positions.setdefault(domain_of(prompt), []).append(position)
            subset = getattr(prompts, "subset", lambda at: [prompts[i] for i in at])
            parts = {domain: subset(at) for domain, at in positions.items()}
        self.sources = {
            domain: PromptSource(part, seed, shuffle, multiple) for domain, part in parts.items()
        }
        self.domains = [*self.sources]

    def draw(
        self,
        n: int,
        besides: Collection[str] = (),
        domain: str | None = None,
        chooser: "Chooser | None" = None,
    ) -> list[Draw]:
        """Take `n` prompts of a domain, all different; see `PromptSource.draw`."""
        source = self.sources[domain]
        return source.draw(n, [uid for uid in besides if uid in source], domain, chooser)

    def left(self, besides: Collection[str] = (), domain: str | None = None) -> int:
        """Number of prompts of a domain besides those with these uids."""
        source = self.sources[domain]
        return len(source) - sum(uid in source for uid in besides)

    def state_dict(self) -> dict[str, Any]:
        """The position in each domain."""
        return {"domains": [(d, s.state_dict()) for d, s in self.sources.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position in each domain."""
        saved = dict(state["domains"])
        if saved.keys() != self.sources.keys():
            raise UsageError(
                f"The checkpoint was made with prompts of {_names(saved)}, this run draws from "
                f"{_names(self.sources)}. Resume with the `per_domain` it was made with, or start "
                "a new run from the weights alone."
            )
        for domain, source in self.sources.items():
            source.load_state_dict(saved[domain])


def _names(domains: Iterable[str | None]) -> str:
    named = sorted(domain for domain in domains if domain is not None)
    return f"the domains {named}" if named else "one domain"


@lru_cache(maxsize=4)
def _order(size: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    if seed is None:
        return np.arange(size)
    # Raw words of Philox: NumPy may change `Generator.permutation` from version to version.
    words = np.random.Philox(key=stable_hash("prompt order", seed, epoch)).random_raw(size)
    return np.argsort(words, kind="stable")
