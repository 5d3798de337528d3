"""Infinite Sampling: how many completions decode at once, in which order.

From the settings of the callback `MicroGroupSampling` and the size of the engine's key-value cache
to an `Admission`, which then lets waiting requests in, one by one, out of a queue of `queues`.
"""

from dataclasses import dataclass

from lit_rlsched.scheduling.admission import Admission, CacheBudget, Refill
from lit_rlsched.scheduling.queues import Order

DEFAULT_SLOTS = 256
"""vLLM's own default on a CPU and on most GPUs, by which throughput has levelled off there."""
LEASES = 8
"""Leases in a completion as long as it may get. More let more completions run in the same memory
and make them stop more often."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The key-value cache of an engine, as far as slots depend on it."""

    token_bytes: int
    """Bytes a token takes in all layers."""
    longest: int
    """Tokens of the longest prompt with a completion as long as it may get."""
    block: int | None = None
    """Tokens of a block; `None`: not paged, each slot has room for a whole completion."""
    capacity: int | None = None
    """Tokens it has room for; `None`: it grows, or the engine has not started yet."""

    @property
    def whole(self) -> int:
        """Tokens of the blocks that a completion as long as it may get takes."""
        return CacheBudget(0, self.block or 1).blocks(self.longest)


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """What `MicroGroupSampling` sets; its arguments say what they mean."""

    slots: int | None = None
    memory_budget: int | None = None
    """Bytes."""
    refill: Refill = "continuous"
    order: Order | None = None
    epsilon: float = 0.1

    def resolved_order(self, predicted: bool, early: bool = False) -> Order:
        """The order, chosen by measurement where the user did not.

        Args:
            predicted: Whether lengths are predicted.
            early: Whether rounds end before all is decoded: what is begun late is then put off.

        Raises:
            ValueError: the order needs predictions and there are none.
        """
        if self.order is None:
            return ("shortest_first" if early else "longest_first") if predicted else "fifo"
        if self.order not in ("fifo", "least_attained") and not predicted:
            raise ValueError(
                f"`MicroGroupSampling(order={self.order!r})` needs to know how long completions "
                "become. Add the callback `LengthPrediction()`, or use `order='least_attained'`."
            )
        return self.order

    def engine_slots(
        self, cache: KVCache, completions: int, shortest: int, by_default: int = DEFAULT_SLOTS
    ) -> int:
        """Most requests the engine will hold at once: `admission` may yet let in fewer.

        Args:
            cache: Of an engine that is not started yet.
            completions: Of the largest rollout.
            shortest: Tokens of the shortest prompt.
            by_default: Requests that the engine runs at once at most where nobody says.

        Raises:
            ValueError: the memory budget is less than one completion may take.
        """
        if self.slots is not None:
            return min(completions, self.slots)
        most = min(completions, by_default)
        if self.memory_budget is None:
            return most
        if cache.block is None:  # a slot takes the room of a whole completion
            full = slots_for_budget(self.memory_budget, cache.token_bytes, cache.longest)
            return min(most, full)
        # whole blocks, and one that a paged engine may keep for itself
        slots_for_budget(self.memory_budget, cache.token_bytes, cache.whole + cache.block)
        begun = self.memory_budget // (cache.token_bytes * (shortest + 1))
        return max(1, min(most, begun))

    def admission(
        self, cache: KVCache, slots: int, max_completion_length: int, order: Order
    ) -> Admission:
        """The admission in front of a started engine that has `slots`; `order` is the resolved one.

        Where nobody says how many slots there are, more than 256 are used only as far as the cache
        holds completions that are half as long as they may get. On average they rarely are longer,
        and where they are, vLLM computes the keys and values of some of them twice.

        Raises:
            ValueError: the engine's cache is too small for the slots or for one completion.
        """
        budget = None
        if self.memory_budget is not None and cache.block is not None:
            budget = self._budget(self.memory_budget, cache, max_completion_length)
        elif cache.capacity is not None and self != SlotSettings():
            self._check_capacity(cache, cache.capacity, slots)
        elif cache.capacity is not None:
            slots = min(slots, max(DEFAULT_SLOTS, 2 * cache.capacity // cache.whole))
        return Admission(slots, self.refill, order, self.epsilon, budget)

    def _budget(self, budget: int, cache: KVCache, max_completion_length: int) -> CacheBudget:
        """The user's or the engine's, whichever is smaller; with leases."""
        tokens, block = budget // cache.token_bytes, cache.block or 1
        tokens = tokens if cache.capacity is None else min(tokens, cache.capacity)
        if tokens < cache.whole:
            raise ValueError(
                f"`memory_budget={budget}` bytes leave {tokens} tokens of cache, and one "
                f"completion may take {cache.whole}: {cache.whole * cache.token_bytes} bytes, and "
                f"one block of {block} tokens that the engine keeps. Raise it, or lower "
                "`max_completion_length`."
            )
        return CacheBudget(tokens, block, max(block, -(-max_completion_length // LEASES)))

    def _check_capacity(self, cache: KVCache, capacity: int, slots: int) -> None:
        """Refuse more slots than there is room for, each with a whole completion."""
        fit, gib = capacity // cache.whole, cache.token_bytes / 2**30
        if fit < slots:
            advice = f"Use `slots={fit}`, or " if fit else "Not even one fits. Use "
            raise ValueError(
                f"`MicroGroupSampling(slots={slots})`: completions as long as they may get need "
                f"{slots * cache.whole * gib:.3g} GiB of key-value cache, and the engine has "
                f"{capacity * gib:.3g} GiB. {advice}a lower `max_completion_length`, or "
                "`memory_budget`, from which as many run as really fit, or give the engine more "
                "memory."
            )


def slots_for_budget(budget: int, kv_bytes_per_token: int, tokens_per_completion: int) -> int:
    """Slots that fit into a memory budget when every completion is as long as it may get.

    Args:
        budget: Bytes of key-value cache.
        kv_bytes_per_token: Bytes a token takes in all layers.
        tokens_per_completion: Longest prompt plus `max_completion_length`.

    Raises:
        ValueError: not even one completion fits.
    """
    one = kv_bytes_per_token * tokens_per_completion
    if budget < one:
        raise ValueError(
            f"`memory_budget={budget}` bytes is less than one completion may take: {one} bytes for "
            f"{tokens_per_completion} tokens. Raise it, or lower `max_completion_length`."
        )
    return budget // one
