"""Checks of a checkpoint against the run that resumes from it, and of a base under its adapters.

Each check raises a `CheckpointError` or `ValueError` that names both values and a fix.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_rlsched.run.saving.checkpoints import CheckpointError
from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import base_model
from lit_rlsched.training.policy import fingerprint
from lit_rlsched.training.precision import main_dtype
from lit_rlsched.types import Group, stable_hash

FORMAT = 5
"""Format of the data module's state."""

SIZES = ("prompts_per_round", "num_generations", "steps_per_round", "num_iterations")
"""Settings of the data module that are the size of a round."""
SAME_ON_RESUME = ("seed", *SIZES)
"""Settings of the data module that decide what is drawn."""

_FIX = "or start a new run in another folder."


def check_same_weights(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    fix: str = f"Resume with the `model` and the `lora_*` settings it was made with, {_FIX}",
) -> None:
    """Refuse a checkpoint of another model or adapter configuration."""
    shapes, found = ({k: v.shape for k, v in of.items()} for of in (ours, theirs))
    if shapes != found:
        different = sorted(k for k in shapes.keys() | found.keys() if shapes.get(k) != found.get(k))
        raise UsageError(
            f"The checkpoint is of another configuration: {len(different)} weights differ, the "
            f"first is {different[0]}: {found.get(different[0])} in the checkpoint, "
            f"{shapes.get(different[0])} here. {fix}"
        )


def check_same_adapter(saved: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> None:
    """Refuse adapters that would be scaled otherwise; their shapes do not show it."""
    scales = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    if saved and ours:
        for name in (name for name in scales if saved.get(name) != ours.get(name)):
            raise UsageError(
                f"The adapters of the checkpoint have `{name}={saved.get(name)}`, those of this "
                f"run `{name}={ours.get(name)}`. Resume with the `lora_*` settings of the "
                f"checkpoint, {_FIX}"
            )


def check_state(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse the state of a data module in another format, or made with another setting."""
    if (theirs := state.get("format", 0)) != FORMAT:
        raise CheckpointError(
            f"The checkpoint has format {theirs}, written by lit_rlsched {state.get('version')}, "
            f"and this version reads format {FORMAT}. Install the version that wrote it, {_FIX}"
        )
    for name, theirs in state["settings"].items():
        if settings[name] != theirs:
            raise UsageError(
                f"The checkpoint was made with `{name}={theirs}`, this run has "
                f"`{name}={settings[name]}`. Resume with the value of the checkpoint, {_FIX}"
            )


def check_drawn(
    packed: Sequence[Mapping[str, Any]],
    saved_funcs: Sequence[str],
    reward_funcs: Sequence[str],
    max_completion_length: int,
) -> None:
    """Refuse a run that would score or cut the completions of the checkpoint in another way."""
    longest = max((group[4] for part in packed for group in part["groups"]), default=0)
    if longest > max_completion_length:
        raise UsageError(
            f"The checkpoint was made with `max_completion_length={longest}` in the middle of a "
            f"pool or a round, this run has `max_completion_length={max_completion_length}`: "
            f"completions in it may be longer. Resume with {longest} or more, {_FIX}"
        )
    scored = any(row is not None for part in packed for row in part["scores"])
    if scored and list(saved_funcs) != list(reward_funcs):
        raise UsageError(
            f"The checkpoint was made with `reward_funcs={list(saved_funcs)}` in the middle of a "
            f"pool or a round, this run has `reward_funcs={list(reward_funcs)}`: completions in it "
            "have scores of the former only. Resume with the same functions in the same order, "
            f"{_FIX}"
        )


def check_whole_groups(pool: Iterable[Group], num_generations: int) -> None:
    """Refuse a pool of incomplete groups, for a run that compares completions of a group."""
    if any(len(group.completions) < num_generations for group in pool):
        raise UsageError(
            "The checkpoint was made in the middle of a pool from which single completions "
            "were trained on, and this run compares each completion with its whole group. "
            "Resume with the `advantage` that it was made with and without `DownSampling`, "
            f"{_FIX}"
        )


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
