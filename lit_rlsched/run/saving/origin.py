"""What a policy was made from: the base of its adapters, and the reference model of its KL."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import fingerprint
from lit_rlsched.training.precision import main_dtype
from lit_rlsched.types import stable_hash


def origin(model: nn.Module, reference: str = "initial") -> dict[str, Any]:
    """Return fingerprints of a model as it was loaded, the same in all precisions but float16."""
    named = base_model(model).state_dict().items()
    adapters = {name: tensor for name, tensor in named if "lora_" in name}
    weights = {n.replace(".base_layer.", "."): t for n, t in named if n not in adapters}
    base = start = fingerprint(weights, torch.bfloat16)
    # two models may differ in this alone, and no weight has it
    if (rope := getattr(base_model(model).config, "rope_parameters", None)) is not None:
        base = start = f"{base}-{stable_hash(json.dumps(rope, sort_keys=True)) % 16**4:04x}"
    if adapters and reference == "initial":
        start = f"{base}-{fingerprint(adapters, torch.bfloat16)}"
    float16 = main_dtype(weights.values()) == torch.float16
    return {"base": base, "reference": start, "float16": float16}


def check_same_origin(
    saved: Mapping[str, Any], ours: Mapping[str, Any], settings: Mapping[str, Any], trains: bool
) -> bool:
    """Refuse another base of the adapters, and in training another reference model."""
    model, beta = settings["model"], settings["beta"]
    needed = {}
    if settings["lora_rank"]:
        needed["base"] = f"the model under its adapters is not that of `model={model}`"
    if beta and trains:
        needed["reference"] = (
            f"the reference model of its KL (`beta={beta}`) is not that of `model={model}` with "
            f"`reference_model={settings['reference_model']}`"
        )
    known = bool(saved) and (not needed or saved["float16"] == ours["float16"])
    for name, what in needed.items():
        if known and saved[name] != ours[name]:
            raise UsageError(
                f"The checkpoint is of another run: {what} (fingerprints {saved[name]} and "
                f"{ours[name]}). Resume with the `model` that the run began with; the folder may "
                "have moved, but its weights must be the same. Or start a new run."
            )
    if needed and trains and not known:
        rank_zero_warn(
            f"The checkpoint does not say what its run began with, or says it in another "
            f"precision. Make sure that `model={model}` is the same model: the base of adapters "
            "and the reference model of the KL are loaded from there."
        )
    return known


def check_base(saved: Mapping[str, Any], base: nn.Module, name: str) -> None:
    """Refuse to add adapters to another base than the one they were trained on."""
    ours = origin(base)
    if saved and saved["float16"] == ours["float16"] and saved["base"] != ours["base"]:
        raise UsageError(
            f"The adapters were trained on another model than `{name}`: it has the fingerprint "
            f"{ours['base']}, and the run's base had {saved['base']}. Name the base model of the "
            "run with `model`."
        )
