"""How many completions decode at once, in which order: from the user's settings to an admission."""

from dataclasses import dataclass

from lit_rlsched.engines.base import EngineSpec, RolloutEngine
from lit_rlsched.scheduling.admission import Admission, CacheBudget, Refill, slots_for_budget
from lit_rlsched.scheduling.queues import Order

MAX_SLOTS = 256
"""Where nobody says how many: vLLM's own default, by which throughput has levelled off."""
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

    def resolved_order(self, predicted: bool) -> Order:
        """The order, chosen by measurement where the user did not.

        Raises:
            ValueError: the order needs predictions and there are none.
        """
        if self.order is None:
            return "longest_first" if predicted else "fifo"
        if self.order != "fifo" and not predicted:
            raise ValueError(
                f"`MicroGroupSampling(order={self.order!r})` needs to know how long completions "
                "become. Add the callback `LengthPrediction()`, or use `order='fifo'`."
            )
        return self.order

    def engine_slots(self, most: int, token_bytes: int, shortest: int, spec_tokens: int) -> int:
        """Most requests the engine will hold at once.

        Args:
            most: Completions of the largest rollout.
            token_bytes: Bytes a token takes in the key-value cache.
            shortest: Tokens of the shortest prompt.
            spec_tokens: `max_model_len`.

        Raises:
            ValueError: the memory budget is less than one completion may take.
        """
        if self.memory_budget is None:
            return min(most, self.slots or MAX_SLOTS)
        slots_for_budget(self.memory_budget, token_bytes, spec_tokens)
        return max(1, min(most, MAX_SLOTS, self.memory_budget // (token_bytes * (shortest + 1))))

    def admission(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        token_bytes: int,
        max_completion_length: int,
        predicted: bool,
    ) -> Admission:
        """The admission in front of a started engine.

        Raises:
            ValueError: the engine's cache is too small for the slots or for one completion.
        """
        admission = Admission(spec.slots, self.refill, self.resolved_order(predicted), self.epsilon)
        room = CacheBudget(engine.kv_capacity or 0, engine.kv_block or 1)
        whole = room.blocks(spec.max_model_len)
        if self.memory_budget is not None:
            tokens = engine.kv_capacity or self.memory_budget // token_bytes
            if engine.kv_block is None:  # a slot takes the room of a whole completion
                admission = Admission(
                    min(spec.slots, tokens // spec.max_model_len),
                    self.refill,
                    admission.order,
                    self.epsilon,
                )
            elif tokens < whole:
                raise ValueError(
                    f"`memory_budget={self.memory_budget}` bytes leave {tokens} tokens of cache, "
                    f"and one completion may take {whole}: {whole * token_bytes} bytes, and one "
                    f"block of {engine.kv_block} tokens that the engine keeps. Raise it, or lower "
                    "`max_completion_length`."
                )
            else:
                lease = max(engine.kv_block, -(-max_completion_length // LEASES))
                admission.budget = CacheBudget(tokens, engine.kv_block, lease)
        elif self.slots is not None and engine.kv_capacity is not None:
            fit = engine.kv_capacity // whole
            if fit < spec.slots:
                gib = token_bytes / 2**30
                raise ValueError(
                    f"`MicroGroupSampling(slots={self.slots})`: completions as long as they may "
                    f"get need {spec.slots * whole * gib:.3g} GiB of key-value cache, and the "
                    f"engine has {engine.kv_capacity * gib:.3g} GiB. Use `slots={fit}`, or "
                    "`memory_budget`, from which as many run as really fit, or give the engine "
                    "more memory."
                )
        return admission
