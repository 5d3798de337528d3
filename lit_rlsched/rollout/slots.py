"""How many completions decode at once, in which order: from the user's settings to an admission."""

from dataclasses import dataclass

from lit_rlsched.engines._default_slots import DEFAULT_SLOTS
from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.scheduling.admission import Admission, CacheBudget, Refill, slots_for_budget
from lit_rlsched.scheduling.queues import Order

LEASES = 8
"""Leases in a completion as long as it may get. More let more completions run in the same memory
and make them stop more often."""


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
        self, engine: RolloutEngine, spec: EngineSpec, token_bytes: int, most: int, shortest: int
    ) -> int:
        """Most requests the engine will hold at once: `admission` may yet let in fewer.

        Args:
            engine: Not started yet.
            spec: Without its `slots`.
            token_bytes: Bytes a token takes in the key-value cache.
            most: Completions of the largest rollout.
            shortest: Tokens of the shortest prompt.

        Raises:
            ValueError: the memory budget is less than one completion may take.
        """
        if self.slots is not None:
            return min(most, self.slots)
        most = min(most, engine.most_slots(spec))
        if self.memory_budget is None:
            return most
        if engine.kv_block is None:  # a slot takes the room of a whole completion
            full = slots_for_budget(self.memory_budget, token_bytes, spec.max_model_len)
            return min(most, full)
        # whole blocks, and one that a paged engine may keep for itself
        one = CacheBudget(0, engine.kv_block).blocks(spec.max_model_len) + engine.kv_block
        slots_for_budget(self.memory_budget, token_bytes, one)
        return max(1, min(most, self.memory_budget // (token_bytes * (shortest + 1))))

    def admission(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        token_bytes: int,
        max_completion_length: int,
        order: Order,
    ) -> Admission:
        """The admission in front of a started engine; `order` is the resolved one.

        Where nobody says how many slots there are, more than 256 are used only as far as the cache
        holds completions that are half as long as they may get. On average they rarely are longer,
        and where they are, vLLM computes the keys and values of some of them twice.

        Raises:
            ValueError: the engine's cache is too small for the slots or for one completion.
        """
        budget, block, capacity = None, engine.kv_block or 1, engine.kv_capacity
        slots = spec.slots
        whole = CacheBudget(0, block).blocks(spec.max_model_len)
        if self.memory_budget is not None and engine.kv_block is not None:
            tokens = self.memory_budget // token_bytes
            tokens = tokens if capacity is None else min(tokens, capacity)
            if tokens < whole:
                raise ValueError(
                    f"`memory_budget={self.memory_budget}` bytes leave {tokens} tokens of cache, "
                    f"and one completion may take {whole}: {whole * token_bytes} bytes, and one "
                    f"block of {block} tokens that the engine keeps. Raise it, or lower "
                    "`max_completion_length`."
                )
            budget = CacheBudget(tokens, block, max(block, -(-max_completion_length // LEASES)))
        elif capacity is not None and self != SlotSettings():
            self._check_capacity(capacity, slots, whole, token_bytes)
        elif capacity is not None:
            slots = min(slots, max(DEFAULT_SLOTS, 2 * capacity // whole))
        return Admission(slots, self.refill, order, self.epsilon, budget)

    def _check_capacity(self, capacity: int, slots: int, whole: int, token_bytes: int) -> None:
        fit, gib = capacity // whole, token_bytes / 2**30
        if fit < slots:
            advice = f"Use `slots={fit}`, or " if fit else "Not even one fits. Use "
            raise ValueError(
                f"`MicroGroupSampling(slots={slots})`: completions as long as they may get need "
                f"{slots * whole * gib:.3g} GiB of key-value cache, and the engine has "
                f"{capacity * gib:.3g} GiB. {advice}a lower `max_completion_length`, or "
                "`memory_budget`, from which as many run as really fit, or give the engine more "
                "memory."
            )
