"""RollPacker's parallelism planner: the model is split as far as its cache needs."""

import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_rlsched.callbacks._datamodule import rollout_datamodule, rollout_schedule
from lit_rlsched.callbacks.rollout_callback import RolloutCallback
from lit_rlsched.checks import check_parallelism
from lit_rlsched.logs import log_now
from lit_rlsched.scheduling.parallelism_planner import (
    RoundKind,
    TensorParallelPlanner,
    check_bounds,
)
from lit_rlsched.training.round import Round


class ParallelismPlanner(RolloutCallback):
    """Split the engine's model over more devices when its cache runs short, over fewer when not.

    RollPacker (arXiv 2509.21009, section 4.2). Where the key-value cache is full vLLM preempts: a
    request loses its cache and computes all of it again later. When the preemptions of a round rise
    above 1.05 times the moving average of its kind, the next such round has twice the
    `tensor_parallel_size`; after four of them without a preemption, half of it. The first sizes are
    the engine's own. Short and long rounds of `TailBatching` have a size each, other rounds one.
    The rule in full: `lit_rlsched.scheduling.parallelism_planner`.

    A new size is a new start of the engine before the round's rollout, which costs what a start
    does: with `TailBatching` and two sizes that is twice in five rounds. Weights come with the
    rollout, as ever, and are verified. Nothing that is drawn depends on it but rounding: log-probs
    differ by about 1e-6 in fp32, so that a run with other sizes is another run. Where the engine
    does not start with a new size, the run goes on without it; a resumed one tries it once more.

    The rule goes by preemptions alone. It does not know that a split model decodes slower where
    nothing is preempted, and takes whatever preempts to be short of cache.

    Each round logs `parallelism/tensor_parallel_size`, `parallelism/restarts` (since the run
    began) and `time/restart`, which is part of `time/rollout`. The state is in the checkpoint.

    Args:
        maximum: Largest size, a power of two. By default as far as the node's GPUs (on CPU, the
            cores this process may use) and the model's attention heads go.
        minimum: Smallest size, a power of two.

    Raises:
        ValueError: a size is no power of two, or `minimum` is above `maximum`.
        MisconfigurationException: the engine does not split its model, or not that far; its own
            size is out of bounds; or `MicroGroupSampling` leaves nothing to preempt.

    Example::

        Trainer(callbacks=[ParallelismPlanner(maximum=4), TailBatching()])
    """

    def __init__(self, maximum: int | None = None, minimum: int = 1) -> None:
        check_bounds(minimum, maximum)
        self.maximum = maximum
        self.minimum = minimum
        self.planner: TensorParallelPlanner | None = None
        self._restarts, self._restart_seconds = 0, 0.0
        self._kind: RoundKind = "short"
        self._trains = False
        self._resumed: dict[str, Any] | None = None
        self._engine: Any = None
        self._schedule: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember the size that the engine came with."""
        self._trains = stage == "fit"
        self._schedule, run = rollout_schedule(trainer, self)
        self._engine = run.engine
        self._first_size = self._engine.tensor_parallel_size

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the sizes, now that engine and model are known."""
        session, name = rollout_datamodule(trainer, self).session, type(self._engine).__name__
        assert session is not None
        most = self._engine.max_tensor_parallel_size(session.spec)
        maximum = most if self.maximum is None else self.maximum
        check_parallelism(name, self._first_size, most, self.minimum, maximum)
        planner = TensorParallelPlanner(self._first_size, maximum, self.minimum)
        if (known := self.state_dict()["planner"]) is not None:
            planner.load_state_dict(known)
        self.planner, self._resumed = planner, None

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, plan: list[Any]) -> None:
        """Start the engine anew if rounds of this kind want another size."""
        session = rollout_datamodule(trainer, self).session
        assert self.planner is not None and session is not None
        self._kind = "long" if self._schedule.rule.is_long(plan) else "short"
        working, self._restart_seconds = session.engine.tensor_parallel_size, 0.0
        if self.planner.size(self._kind) != working:
            started = time.perf_counter()
            if told := self.planner.restart(self._kind, working, session.restart):
                rank_zero_warn(told)
            self._restart_seconds = time.perf_counter() - started
            self._restarts += 1

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Learn from its preemptions."""
        assert self.planner is not None
        log_now(
            trainer,
            {
                "parallelism/tensor_parallel_size": self._engine.tensor_parallel_size,
                "parallelism/restarts": self._restarts,
                "time/restart": self._restart_seconds,
            },
        )
        self.planner.observe(self._kind, int(round.metrics["rollout/preemptions"]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the engine as it came."""
        if self._engine is not None:
            self._engine.tensor_parallel_size = self._first_size

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same: Lightning does not tear down after one."""
        self.teardown(trainer, pl_module, "")

    def state_dict(self) -> dict[str, Any]:
        """Sizes, what they follow from, and the one the engine has."""
        planned = self._resumed or (self.planner and self.planner.state_dict())
        size = None if self._engine is None else self._engine.tensor_parallel_size
        return {"planner": planned, "restarts": self._restarts, "size": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with those of a checkpoint, in an engine that starts with its size."""
        if not self._trains:
            return
        self._resumed, self._restarts = state_dict["planner"], state_dict["restarts"]
        size = max(self.minimum, state_dict["size"])
        self._engine.tensor_parallel_size = min(size, self.maximum or size)
