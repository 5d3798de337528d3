"""Random states in checkpoints, which Lightning 2.6 does not store."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


class RNGState(Callback):
    """Store the random states of Python, NumPy and torch in checkpoints, so that resume is exact.

    They are restored when training starts, after the sanity check and the set-up of the loaders.
    """

    _saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors only, for `torch.load(weights_only=True)`."""
        states = _collect_rng_states()
        kind, keys, *rest = states["numpy"]
        return {**states, "numpy": [kind, keys.tolist(), *rest]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the states until training starts."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the states."""
        if self._saved is not None:
            _set_rng_states(self._saved)
            self._saved = None
