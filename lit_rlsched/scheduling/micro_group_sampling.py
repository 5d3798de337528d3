"""Infinite Sampling: how many completions decode at once, and in which order.

Turns the settings of the callback `MicroGroupSampling` and the size of the engine's key-value cache
into an `Admission`.
"""

from dataclasses import dataclass, replace

from lit_rlsched.scheduling.admission import Admission, CacheBudget, Order, Refill
from lit_rlsched.settings import UsageError

DEFAULT_SLOTS = 256
"""vLLM's default on a CPU and on most GPUs, where more slots hardly raise the throughput."""
LEASES = 8
"""Leases of a completion of the maximum length. More leases let more completions run in the same
memory, and make them pause more often."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """Size of an engine's key-value cache."""

    token_bytes: int
    """Bytes per token in all layers."""
    longest: int
    """Tokens of the longest prompt plus `max_completion_length`."""
    block: int | None = None
    """Tokens of a block; `None`: not paged, each slot reserves `longest` tokens."""
    capacity: int | None = None
    """Tokens that fit; `None`: the cache grows, or the engine has not started yet."""

    @property
    def whole(self) -> int:
        """`longest`, rounded up to whole blocks."""
        return CacheBudget(0, self.block or 1).blocks(self.longest)


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """The arguments of `MicroGroupSampling`, which documents them."""

    slots: int | None = None
    memory_budget: int | None = None
    """Bytes."""
    refill: Refill = "continuous"
    order: Order | None = None
    engines: int = 1
    """Number of engines that the settings were divided by."""

    def share(self, engines: int) -> "SlotSettings":
        """Return the settings of each of several engines."""
        slots, budget = self.slots, self.memory_budget
        if slots is not None and slots % engines:
            raise UsageError(
                f"`MicroGroupSampling(slots={slots})` with `num_engines={engines}`: each engine "
                f"has the same number of slots. Use {max(1, slots // engines) * engines} slots."
            )
        return replace(
            self,
            slots=None if slots is None else slots // engines,
            memory_budget=None if budget is None else budget // engines,
            engines=engines,
        )

    @property
    def _each(self) -> str:
        """What a message says beside a value of one engine."""
        return f" on each of {self.engines} engines" if self.engines > 1 else ""

    def resolved_order(self, predicted: bool, early: bool = False) -> Order:
        """The order of the waiting completions, by default the one that measured best."""
        if self.order is None:
            return ("shortest_first" if early else "longest_first") if predicted else "fifo"
        if self.order != "fifo" and not predicted:
            raise UsageError(
                f"`MicroGroupSampling(order={self.order!r})` needs predicted lengths. Add the "
                "callback `LengthPrediction()`, or use `order='fifo'`."
            )
        return self.order

    def engine_slots(
        self, cache: KVCache, completions: int, shortest: int, by_default: int = DEFAULT_SLOTS
    ) -> int:
        """Maximum number of requests inside each engine; `admission` may admit fewer."""
        if self.slots is not None:
            return min(completions, self.slots)
        most = min(completions, by_default)
        if self.memory_budget is None:
            return most
        if cache.block is None:
            full = slots_for_budget(
                self.memory_budget, cache.token_bytes, cache.longest, self._each
            )
            return min(most, full)
        # refuse less than a completion in whole blocks, with one block that the engine may keep
        least = cache.whole + cache.block
        slots_for_budget(self.memory_budget, cache.token_bytes, least, self._each)
        begun = self.memory_budget // (cache.token_bytes * (shortest + 1))
        return max(1, min(most, begun))

    def admission(
        self, cache: KVCache, slots: int, max_completion_length: int, order: Order
    ) -> Admission:
        """Make the admission for a started engine.

        Without settings, more than 256 slots are used only if the cache holds so many completions
        of half the maximum length. Most completions are shorter than that; if they are not, vLLM
        preempts some and computes their cache twice.
        """
        budget = None
        if self.memory_budget is not None and cache.block is not None:
            budget = self._budget(self.memory_budget, cache, max_completion_length)
        elif cache.capacity is not None and replace(self, engines=1) != SlotSettings():
            self._check_capacity(cache, cache.capacity, slots)
        elif cache.capacity is not None:
            slots = min(slots, max(DEFAULT_SLOTS, 2 * cache.capacity // cache.whole))
        return Admission(slots, self.refill, order, budget)

    def _budget(self, budget: int, cache: KVCache, max_completion_length: int) -> CacheBudget:
        """The smaller of the user's budget and the engine's cache."""
        tokens, block = budget // cache.token_bytes, cache.block or 1
        tokens = tokens if cache.capacity is None else min(tokens, cache.capacity)
        if tokens < cache.whole:
            raise UsageError(
                f"`memory_budget={budget}` bytes{self._each} hold {tokens} tokens of cache. One "
                f"completion may take {cache.whole} tokens or {cache.whole * cache.token_bytes} "
                f"bytes, and the engine keeps one block of {block} tokens. Raise the budget, or "
                "lower `max_completion_length`."
            )
        return CacheBudget(tokens, block, max(block, -(-max_completion_length // LEASES)))

    def _check_capacity(self, cache: KVCache, capacity: int, slots: int) -> None:
        """Refuse slots that the cache cannot fill with completions of the maximum length."""
        fit, gib = capacity // cache.whole, cache.token_bytes / 2**30
        if fit < slots:
            most = fit * self.engines
            advice = f"Use `slots={most}`," if fit else "Not even one fits. Use"
            raise UsageError(
                f"`MicroGroupSampling(slots={slots * self.engines})`: completions of the maximum "
                f"length need {slots * cache.whole * gib:.3g} GiB of key-value cache{self._each}, "
                f"and the engine has {capacity * gib:.3g} GiB. {advice} a lower "
                "`max_completion_length` or `memory_budget`, which runs as many completions as fit "
                "at the moment, or give the engine more memory."
            )


def slots_for_budget(
    budget: int, kv_bytes_per_token: int, tokens_per_completion: int, where: str = ""
) -> int:
    """Number of completions of the maximum length that fit into a memory budget."""
    one = kv_bytes_per_token * tokens_per_completion
    if budget < one:
        raise UsageError(
            f"`memory_budget={budget}` bytes{where} is less than one completion may take: {one} "
            f"bytes for {tokens_per_completion} tokens. Raise it, or lower `max_completion_length`."
        )
    return budget // one
