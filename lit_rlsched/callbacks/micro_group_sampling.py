"""Infinite Sampling: group size no longer decides how much memory decoding takes."""

from typing import get_args

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.admission import Refill
from lit_rlsched.scheduling.micro_group_sampling import SlotSettings
from lit_rlsched.scheduling.queues import Order
from lit_rlsched.settings import check_choice, check_count
from lit_rlsched.sizes import parse_bytes


class MicroGroupSampling(RolloutCallback):
    """Decode at most `slots` completions at once, whatever `num_generations` is.

    The micro sampling groups and the continuous sampling of Infinite Sampling (arXiv 2506.22950).
    It changes when a completion is drawn, never which: the same tokens, with log-probs equal up to
    the engine's batch noise (on vLLM in fp32 5e-7).

    Without it 256 decode at once, or all of a round where it has fewer; with vLLM on a GPU of
    70 GiB or more up to 1,024, if the cache holds so many of half the longest length. Each round
    logs the number as `rollout/slots`.

    Args:
        slots: Most completions that decode at once (the paper's fixed slots). Refused where the
            engine's key-value cache could not hold that many completions of full length.
        memory_budget: Key-value cache that completions may take together, such as `2GiB`, instead
            (the paper's dynamic slots): as many run as fit into it at the moment, never more, at
            most 256 (vLLM on a GPU of 70 GiB or more: 1,024). A completion draws up to an eighth of
            `max_completion_length` at a time; where the budget is full it waits for others to end,
            and goes on with the same tokens as if it had not.
        refill: `continuous` refills a slot as soon as it is free (continuous sampling), `rounds`
            only when all are (naive micro sampling groups).
        order: Which waiting completion goes first: `fifo`, in the order of the data;
            `least_attained`, in turns of an eighth of `max_completion_length`, whoever has drawn
            the fewest tokens first, so that what becomes long begins early though nobody predicts
            it (except in rounds of `SortedBatching` that may throw away what has begun);
            `shortest_first` or `longest_first`, by what `LengthPrediction` expects; `planned`:
            spread over the slots so that the last one ends early, then a slot without work steals
            the shortest that has not started (the paper's two stages). By default `fifo` without
            `LengthPrediction`, `longest_first` with it, see below, and with it and `SortedBatching`
            `shortest_first`.

    What the orders need more than the fewest decode steps possible, on the quick task's completions
    with 16 slots (`python -m benchmarks run steps`): naive rounds 204 %; continuous fifo
    13 %. With lengths known in advance shortest first 16 %, as much as sorted rounds, longest first
    0.6 %, planned 0.0 %. With learned lengths longest first 8 % and planned 10 %: a plan binds a
    completion to a slot by a length that is often wrong, and what is stolen shortest first leaves
    the long ones to the end. Hence the default, and `planned` where lengths are known well.

    Raises:
        ValueError: an argument is out of range, or two contradict each other.

    Example::

        Trainer(callbacks=[MicroGroupSampling(slots=32), LengthPrediction()])
    """

    sets = "which completion decodes when"

    def __init__(
        self,
        slots: int | None = None,
        memory_budget: str | int | None = None,
        refill: Refill = "continuous",
        order: Order | None = None,
    ) -> None:
        if (slots is None) == (memory_budget is None):
            raise ValueError(
                f"`MicroGroupSampling(slots={slots}, memory_budget={memory_budget})`: give exactly "
                "one of the two."
            )
        if slots is not None:
            check_count("MicroGroupSampling", "slots", slots, 1)
        check_choice("MicroGroupSampling", "refill", refill, get_args(Refill))
        if order is not None:
            check_choice("MicroGroupSampling", "order", order, get_args(Order))
        if refill == "rounds" and order in ("planned", "least_attained"):
            raise ValueError(
                f"`MicroGroupSampling(refill='rounds', order={order!r})`: that order is for slots "
                "that are refilled. Use `refill='continuous'`, or `order='longest_first'`, which "
                "sorts the micro groups."
            )
        budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
        self.settings = SlotSettings(slots, budget, refill, order)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the settings into the schedule."""
        schedule, _ = rollout_schedule(trainer, self)
        schedule.slots = self.settings
