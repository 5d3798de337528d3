"""The engine gets the weights that are trained, and is checked to decode with them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from torch import nn

from lit_rlsched.engines.base import EngineDied, EngineSpec, RolloutEngine
from lit_rlsched.policy import named_weights
from lit_rlsched.training.finite import check_weights
from lit_rlsched.training.sync_probe import SyncProbe
from lit_rlsched.types import Prompt


class WeightSync:
    """Loads the policy's weights into a started engine.

    Args:
        engine: Gets them.
        spec: What it is started with.
        policy: The model that is trained.
        probe: Two prompts for the check after each sync; none switches it off.
        probe_temperature: The temperature they are drawn at.
        forward_context: The Trainer's precision context for the trainer's side of that check.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        spec: EngineSpec,
        policy: nn.Module,
        *,
        probe: Sequence[Prompt] = (),
        probe_temperature: float = 1.0,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._engine, self._policy = engine, policy
        probed = list(probe)[: spec.slots]
        self._probe: SyncProbe | None = None
        if probed:
            self._probe = SyncProbe(
                engine, spec, policy, probed, probe_temperature, forward_context
            )

    def __call__(self, version: int) -> dict[str, float]:
        """Load the weights of `version`; `sync/max_logp_diff`, where it is checked.

        Raises:
            FloatingPointError: a weight is NaN or infinite: no engine gets it.
            RuntimeError: the engine does not decode with these weights.
        """
        check_weights(self._policy)
        self._engine.sync_weights(named_weights(self._policy), version)
        while self._probe is not None:
            with suppress(EngineDied):  # the next one has the weights, and not the probes
                return {"sync/max_logp_diff": self._probe.check(version)}
        return {}
