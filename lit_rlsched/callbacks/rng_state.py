"""Random states in the checkpoint: Lightning 2.6 does not keep them."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


class RNGState(Callback):
    """Save Python's, NumPy's and torch's random states with the weights.

    Without them a resumed run is another one. Restored when training starts, after the sanity check
    and the set-up of the loaders.
    """

    _saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors only, for `torch.load(weights_only=True)`."""
        states = _collect_rng_states()
        kind, keys, *rest = states["numpy"]
        return {**states, "numpy": [kind, keys.tolist(), *rest]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until training starts."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set them."""
        if self._saved is not None:
            _set_rng_states(self._saved)
            self._saved = None
