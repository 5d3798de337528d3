"""Memory of a run that has started, as far as it can be counted without a forward pass."""

from typing import Any

from lightning import LightningModule

from lit_rlsched.cli.estimate.live import storage_bytes
from lit_rlsched.cli.estimate.report import device_memory
from lit_rlsched.engines.spec import Footprint, Sizes
from lit_rlsched.run.training_run import TrainingRun
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import find_policy, local


def counted_peaks(module: LightningModule, run: TrainingRun) -> tuple[int, int]:
    """Return rank 0's bytes of weights, gradients, optimizer state and engine in a started run.

    Engines on GPUs of their own, activations and the temporaries of decode steps are left out.
    `Ledger` measures the latter two on fake tensors, which takes longer.

    Args:
        module: The module, with its policy.
        run: The run, whose engine has started.

    Returns:
        Bytes in the rollout, and at the peak of the update.
    """
    references: list[Any] = getattr(module, "_reference", [])
    models = [module, *references]
    weights = storage_bytes(local(t) for m in models for t in (*m.parameters(), *m.buffers()))
    gradients = storage_bytes(local(p) for p in module.parameters() if p.requires_grad)
    state = 2 * gradients  # AdamW's
    streams = run.schedule.streaming is not None
    engine = _footprint(module, run)
    beside = 0 if engine.apart else engine.weights + engine.cache
    rollout = weights + state + beside + streams * gradients
    stays = engine.stays or run.schedule.ahead is not None
    update = weights + state + gradients + stays * beside
    return rollout, update


def _footprint(module: LightningModule, run: TrainingRun) -> Footprint:
    assert run.session is not None
    spec, policy = run.session.spec, base_model(find_policy(module))
    parameters = sum(p.numel() for name, p in policy.named_parameters() if "lora_" not in name)
    token_bytes = run.startup.cache_bytes_per_token(spec)
    memory = device_memory("cuda" if spec.device.type == "cuda" else "cpu")
    return run.settings.engine.footprint(spec, Sizes(parameters, token_bytes, memory))
