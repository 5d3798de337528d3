"""Infinite Sampling: group size no longer decides how much memory decoding takes."""

import re
from typing import Literal

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks._datamodule import rollout_datamodule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.scheduling.admission import Refill

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class MicroGroupSampling(RolloutCallback):
    """Decode at most `slots` completions at once, whatever `num_generations` is.

    The micro sampling groups of Infinite Sampling (arXiv 2506.22950). It changes when a completion
    is drawn, never which: nothing that is learned depends on it.

    Args:
        slots: Most completions that decode at once.
        memory_budget: Key-value cache from which slots follow instead, such as `2GiB`, when every
            completion is as long as it may get.
        refill: `continuous` refills a slot as soon as it is free, `rounds` only when all are.
        order: Which waiting completion goes first: `fifo`, in the order of the data.

    Raises:
        ValueError: both or neither of `slots` and `memory_budget` are given, or one is below 1.

    Example::

        Trainer(callbacks=[MicroGroupSampling(slots=32)])
    """

    def __init__(
        self,
        slots: int | None = None,
        memory_budget: str | int | None = None,
        refill: Refill = "continuous",
        order: Literal["fifo"] = "fifo",
    ) -> None:
        if (slots is None) == (memory_budget is None):
            raise ValueError(
                f"`MicroGroupSampling(slots={slots}, memory_budget={memory_budget})`: give exactly "
                "one of the two."
            )
        if slots is not None and slots < 1:
            raise ValueError(f"`MicroGroupSampling(slots={slots})`: must be 1 or more.")
        if refill not in ("continuous", "rounds"):
            raise ValueError(f"`refill={refill!r}` is unknown. Use 'continuous' or 'rounds'.")
        if order != "fifo":
            raise ValueError(f"`order={order!r}` is unknown. Use 'fifo'.")
        self.slots = slots
        self.memory_budget = None if memory_budget is None else parse_bytes(memory_budget)
        self.refill = refill
        self.order = order

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the settings to the data module, before it starts its engine."""
        datamodule = rollout_datamodule(trainer, self)
        datamodule.slots = self.slots
        datamodule.memory_budget = self.memory_budget
        datamodule.refill = self.refill


def parse_bytes(size: str | int) -> int:
    """Read a size such as `2GiB`, `512 MB` or a number of bytes.

    Raises:
        ValueError: it is not one, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if not match or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"`memory_budget={size!r}`: expected a size such as '2GiB' or '512MB'.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
