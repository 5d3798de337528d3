"""RollPacker: which rounds wait for long completions, and what is done meanwhile."""

import math
import time
from typing import Any

from lightning import LightningModule, Trainer

from lit_rlsched.callbacks.rollout_callback import RolloutCallback, run_of
from lit_rlsched.run.trainer import log_now
from lit_rlsched.scheduling.rollpacker import (
    AdaptiveTimeout,
    RoundKind,
    TensorParallelPlanner,
    check_power_of_two,
)
from lit_rlsched.scheduling.tail_batching import TailRound
from lit_rlsched.settings import UsageError
from lit_rlsched.training.round import Round
from lit_rlsched.training.schedule import RunFacts, Schedule


class TailBatching(RolloutCallback):
    """End most rounds without waiting for their longest completions.

    RollPacker (arXiv 2509.21009, section 3). A short round begins
    `prompt_ratio * prompts_per_round` prompts, ends once `prompts_per_round` of them are decoded
    and scored, and defers the others. Once that many are deferred, a long round runs the oldest to
    their end. The newest policy draws all completions of an update.

    Bias: updates see prompts with long completions later and together. A deferred prompt is drawn
    again, and a completion that was long may then be short. `completion_ratio` favours short
    completions inside each prompt. `rollout/trained_over_drawn_length` and
    `pool/trained_over_drawn_length` understate the bias. `RolloutWindow(overtake=2)` draws nothing
    again, and is faster.

    See `docs/explanation/rollpacker.md`.

    Args:
        prompt_ratio: Prompts of a short round, as a multiple of `prompts_per_round`, rounded up.
            With 1, and no `completion_ratio`, the run equals the synchronous one bit for bit.
        completion_ratio: Completions of a fresh prompt, as a multiple of `num_generations`, rounded
            up; the first `num_generations` that finish are kept. The paper uses 1.25. By default
            completions do not race.
        per_domain: Share of each domain (column `domain`) in the update of a short round, such as
            `{"math": 0.5, "code": 0.5}`; prompts race inside their domain. By default all prompts
            race together, which favours domains with short completions.

    Raises:
        UsageError: an argument is out of range, or the data holds too few prompts.

    Example::

        Trainer(callbacks=[TailBatching(), MicroGroupSampling(slots=64)])
    """

    sets = "when a round ends"

    def __init__(
        self,
        prompt_ratio: float = 1.25,
        completion_ratio: float | None = None,
        per_domain: dict[str, float] | None = None,
    ) -> None:
        total = 1.0 if per_domain is None else sum(per_domain.values())
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise UsageError(
                f"`TailBatching({per_domain=})`: shares must add up to 1, but add up to {total:g}."
            )
        self.prompt_ratio, self.completion_ratio = prompt_ratio, completion_ratio
        self.per_domain = per_domain

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the rule."""
        sizes = facts.settings.prompts_per_round, facts.settings.num_generations
        ratios = self.prompt_ratio, self.completion_ratio or 1.0
        schedule.rule = TailRound(*sizes, *ratios, shares=self.per_domain)


class ParallelismPlanner(RolloutCallback):
    """Adapt `tensor_parallel_size` to how often vLLM runs out of key-value cache.

    RollPacker (arXiv 2509.21009, section 4.2). If the cache is full, vLLM preempts requests and
    computes their cache again. The size doubles if a round's preemptions exceed 1.05 times their
    moving average, and halves after four rounds without any; short and long rounds of
    `TailBatching` count apart.

    Bias: none beyond rounding. Log-probs differ by about 1e-6 in fp32 between sizes, so a run with
    other sizes draws other completions. A new size restarts the engine (`time/restart`). The rule
    takes every preemption for a shortage of cache, and does not know that a split model may decode
    more slowly.

    See `docs/explanation/streaming_and_parallelism.md`.

    Args:
        maximum: Largest size, a power of two. By default what the node's GPUs (on CPU, the cores
            this process may use) and the model's attention heads allow.
        minimum: Smallest size, a power of two.

    Raises:
        ValueError: a size is not a power of two, or `minimum` is above `maximum`.
        UsageError: the engine cannot split its model, or not that far; its own size
            is out of bounds; or `MicroGroupSampling` rules out preemptions.

    Example::

        Trainer(callbacks=[ParallelismPlanner(maximum=4), TailBatching()])
    """

    sets = "how many devices the model is split over"

    def __init__(self, maximum: int | None = None, minimum: int = 1) -> None:
        check_power_of_two(f"ParallelismPlanner({minimum=})", minimum)
        if maximum is not None:
            check_power_of_two(f"ParallelismPlanner({maximum=})", maximum)
            if minimum > maximum:
                raise UsageError(
                    f"`ParallelismPlanner({maximum=}, {minimum=})`: `minimum` must be at most "
                    "`maximum`. Swap them, or leave `minimum` out."
                )
        self.maximum, self.minimum = maximum, minimum
        self.planner: TensorParallelPlanner | None = None
        self._restarts, self._restart_seconds = 0, 0.0
        self._kind: RoundKind = "short"
        self._trains = False
        self._resumed: dict[str, Any] | None = None
        self._engine: Any = None

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Remember the engine's own size."""
        self._trains, self._engine = facts.trains, facts.settings.engine
        self._first_size = self._engine.tensor_parallel_size

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the sizes and create the planner, now that engine and model are known."""
        session = run_of(trainer, self).session
        assert session is not None
        name, engines = self._engine.name, len(self._engine.engines)
        each = f" for each of {engines} engines" if engines > 1 else ""
        fewer = ", use a smaller `num_engines`" if engines > 1 else ""
        most, size = self._engine.max_tensor_parallel_size(session.spec), self._first_size
        maximum = most if self.maximum is None else self.maximum
        if most == 1:
            raise UsageError(
                f"`ParallelismPlanner` has nothing to choose{each}: `{name}` can split this model "
                f"over one device of this node at most. Remove the callback{fewer}, or use "
                "`VLLMEngine` on a node with more GPUs (on CPU: cores)."
            )
        if maximum > most:
            raise UsageError(
                f"`ParallelismPlanner({maximum=})`: the node's devices and the model's attention "
                f"heads allow {most}{each}. Use {most}, or leave it out."
            )
        if not self.minimum <= size <= maximum:
            raise UsageError(
                f"`{name}(tensor_parallel_size={size})` is where `ParallelismPlanner` begins, and "
                f"it chooses from {self.minimum} to {maximum}. Change the one or the other."
            )
        check_power_of_two(f"{name}(tensor_parallel_size={size})", size)
        check_power_of_two(f"ParallelismPlanner({maximum=})", maximum)
        planner = TensorParallelPlanner(size, maximum, self.minimum)
        if (known := self.state_dict()["planner"]) is not None:
            planner.load_state_dict(known)
        self.planner, self._resumed = planner, None

    def on_round_start(self, trainer: Trainer, pl_module: LightningModule, plan: list[Any]) -> None:
        """Restart the engine if rounds of this kind have another size."""
        run = run_of(trainer, self)
        session = run.session
        assert self.planner is not None and session is not None
        self._kind = "long" if run.schedule.rule.is_long(plan) else "short"
        size, self._restart_seconds = self.planner.size(self._kind), 0.0
        if size != session.engine.tensor_parallel_size:
            started = time.perf_counter()
            session.restart(size)
            self._restart_seconds = time.perf_counter() - started
            self._restarts += 1

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log the size, and let the planner learn from the round's preemptions."""
        assert self.planner is not None
        metrics = {
            "parallelism/tensor_parallel_size": self._engine.tensor_parallel_size,
            "parallelism/restarts": self._restarts,
            "time/restart": self._restart_seconds,
        }
        log_now(trainer, metrics)
        self.planner.observe(self._kind, int(round.metrics["rollout/preemptions"]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the engine its own size back."""
        if self._engine is not None:
            self._engine.tensor_parallel_size = self._first_size

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Do the same: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")

    def state_dict(self) -> dict[str, Any]:
        """Return the planner's state, the number of restarts, and the engine's size."""
        planned = self._resumed or (self.planner and self.planner.state_dict())
        size = getattr(self._engine, "tensor_parallel_size", None)  # None before `setup`
        return {"planner": planned, "restarts": self._restarts, "size": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume with the checkpoint's state, and let the engine start with its size."""
        if not self._trains:
            return
        self._resumed, self._restarts = state_dict["planner"], state_dict["restarts"]
        size = max(self.minimum, state_dict["size"])
        self._engine.tensor_parallel_size = min(size, self.maximum or size)


class AdaptiveTimeouts(RolloutCallback):
    """Kill reward calls that take much longer than those for correct completions of the prompt.

    RollPacker (arXiv 2509.21009, section 4.3). A call of a reward function may take
    `min(max(minimum, scale * anchor), maximum)` seconds. The anchor is the longest call so far for
    a correct completion (first reward 1.0 or more) of the same prompt. Without an anchor the limit
    is `maximum`, which replaces `reward_timeout`.

    Bias: against completions that are slow to score. A killed call gives no reward and is counted
    in `rewards/<func>/timeouts`.

    See `docs/explanation/streaming_and_parallelism.md`.

    Args:
        scale: Multiple of the anchor.
        minimum: Lower bound in seconds, since calls take longer on a busy machine.
        maximum: Upper bound in seconds.

    Raises:
        UsageError: an argument is out of range.

    Example::

        Trainer(callbacks=[AdaptiveTimeouts(maximum=10), TailBatching()])
    """

    sets = "how long a reward may take"

    def __init__(self, scale: float = 1.5, minimum: float = 2.0, maximum: float = 30.0) -> None:
        if minimum > maximum:
            raise UsageError(
                f"`AdaptiveTimeouts({minimum=}, {maximum=})`: `minimum` must be at most "
                "`maximum`. Lower `minimum`, or raise `maximum`."
            )
        self.timeouts = AdaptiveTimeout(scale, minimum, maximum)

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set the time-outs."""
        schedule.timeouts = self.timeouts

    def on_round_end(self, trainer: Trainer, pl_module: LightningModule, round: Round) -> None:
        """Log the time-outs of the round's prompts."""
        limits = [self.timeouts.of(group.prompt.uid) for group in round.groups]
        round.metrics["reward_timeout/mean"] = sum(limits) / len(limits)

    def state_dict(self) -> dict[str, Any]:
        """Return the anchors."""
        return self.timeouts.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the anchors."""
        self.timeouts.load_state_dict(state_dict)


class StreamedTraining(RolloutCallback):
    """Compute the gradients of finished groups while other groups still decode.

    RollPacker (arXiv 2509.21009, section 4.4). During a rollout the trainer runs forward and
    backward passes over groups as they are scored. At the end of the round it does so for the other
    groups and takes the first optimizer step.

    Bias: none; the update is the same up to rounding. Runs repeat bit for bit, but with
    `TailBatching(completion_ratio=...)` only up to rounding. The engine must decode in its own
    process, and gradients are in memory beside its cache. Little overlaps if decisions of the
    trainer change what the engine decodes, such as those of `DynamicSampling`.

    See `docs/explanation/streaming_and_parallelism.md`.

    Args:
        start: Share of an update's prompts that must be ready before the first gradients are
            computed; later ones wait for as many, or for a micro-batch if that is less.

    Raises:
        UsageError: `start` is out of range.
        UsageError: the engine is in the trainer's process, a round is divided over
            several optimizer steps, the module optimizes automatically, or advantages or loss need
            the whole update.

    Example::

        data = RolloutDataModule(..., engine=ProcessEngine(VLLMEngine()))
        Trainer(callbacks=[StreamedTraining(), TailBatching()])
    """

    sets = "when gradients are computed"

    def __init__(self, start: float = 0.2) -> None:
        self.start = start

    def apply(self, schedule: Schedule, facts: RunFacts) -> None:
        """Set when gradients are computed."""
        if facts.trains:
            schedule.streaming = self.start
            schedule.beside_update.append("`StreamedTraining`")
