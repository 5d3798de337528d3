"""A model or tokenizer that was given as an object, as a folder that loads an equal one.

The engine, the reference model and a resumed run load the policy by its name.
"""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlsched.settings import UsageError
from lit_rlsched.training.lora import ADAPTER, MERGE, base_model, needing_peft
from lit_rlsched.training.policy import (
    context_length,
    evaluating,
    load_policy,
    load_tokenizer,
    num_embeddings,
)

_PROBE = "The quick brown fox: 0123456789 = {'a': [1.5, -2]}\n\tÄö 你好 <b>end</b>"
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of logits, as a part of the largest logit; in half precision more."""
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_folder(given: Any, folder: Path, *, several: bool, gets_adapter: bool) -> str:
    """Return the name that loads an equal model, or `folder`, to which it is saved."""
    base = base_model(given) if isinstance(given, nn.Module) else None
    if not isinstance(base, PreTrainedModel):
        why = "give a model of transformers, peft's `PeftModel` of one, or a folder"
        raise _refused(f"it is a `{type(given).__name__}`: {why}")
    if getattr(base, "_hf_peft_config_loaded", False):
        raise _refused(
            "its adapter is a part of the model, as `AutoModelForCausalLM` loads it: give the "
            "adapter's folder, or what `peft.AutoPeftModelForCausalLM.from_pretrained(folder, "
            "is_trainable=True)` returns"
        )
    if getattr(base.config, "quantization_config", None) is not None:
        raise _refused("its weights are quantised, and these can be neither trained nor decoded")
    adapted = hasattr(given, "peft_config")
    if adapted and gets_adapter:
        raise _refused(f"it has an adapter already, and `peft_config` adds another. {MERGE}")
    _check_trained(given, gets_adapter)
    if adapted and not several:
        return _saved_adapter(given, folder)
    name = str(base.name_or_path or "")
    return _first_equal(
        "model",
        lambda at: _difference(given, at, ADAPTER, gets_adapter),
        None if adapted else name,
        None if several else lambda: _written(folder, base.save_pretrained),
    )


def tokenizer_folder(given: Any, folder: Path, *, several: bool) -> str:
    """Return the name or folder of a tokenizer that equals a given one; see `model_folder`."""

    def difference(at: str) -> str | None:
        inner = getattr(given, "tokenizer", given)  # of a processor
        loaded = load_tokenizer(at)
        ids, ours = (one(_PROBE)["input_ids"] for one in (inner, loaded))
        if list(ids) != list(ours) or len(inner) != len(loaded):
            return "its tokens are others"
        for name in ("chat_template", "eos_token_id", "bos_token_id", "all_special_ids"):
            if getattr(inner, name, None) != getattr(loaded, name, None):
                return f"its `{name}` is another"
        return None

    name = str(getattr(given, "name_or_path", ""))
    save = None if several else lambda: _written(folder, given.save_pretrained)
    return _first_equal("processing_class", difference, name, save)


def _refused(why: str, what: str = "model") -> UsageError:
    return UsageError(f"`{what}`: what is trained would not be the object that is given: {why}.")


def _first_equal(
    what: str,
    difference: Callable[[str], str | None],
    name: str | None,
    save: Callable[[], str] | None,
) -> str:
    """Return the name, or else where the object was saved, if that loads one without difference."""
    why: str | None = "it has an adapter"
    if name is not None:
        try:
            why = difference(name)
        except (UsageError, OSError, ValueError):
            why = f"`name_or_path={name}` loads nothing"
        if why is None:
            return name
    if save is None:
        raise _refused(
            f"several processes load it by its name, and {why}. Save it with `save_pretrained` "
            "before the run, and give the folder",
            what,
        )
    if (why := difference(folder := save())) is None:
        return folder
    raise _refused(
        f"saved with `save_pretrained` and loaded again, {why}. Write the change into a folder "
        "that transformers loads, and give the folder",
        what,
    )


def _written(folder: Path, save: Callable[[str], Any]) -> str:
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    save(str(folder))
    return str(folder)


def _check_trained(given: Any, gets_adapter: bool) -> None:
    """Refuse a model of which other weights are trainable than those that would be trained."""
    active = _active(given)
    for name, weight in given.named_parameters():
        if weight.is_meta:
            raise _refused(f"`{name}` is on the device `meta` and has no values")
        if weight._backward_hooks:
            raise _refused(f"`{name}` has a hook that changes its gradient")
        trained = active is None or _is_of(name, active)
        if weight.requires_grad == trained or gets_adapter:
            continue
        if active is None:
            why = (
                f"`{name}` is frozen; all weights are trained, or adapters: call "
                "`requires_grad_(True)` of the model, or give `peft_config`"
            )
        elif trained:
            why = f"`{name}` is frozen: load the adapter with `is_trainable=True`"
        else:
            why = f"`{name}` is trainable, and only the adapter `{active}` is trained"
        raise _refused(why)


def _active(given: Any) -> str | None:
    """Return the adapter that is used; None for a model without one."""
    if not hasattr(given, "peft_config"):
        return None
    active = [*given.active_adapters]
    if len(active) != 1:
        raise _refused(f"it has {len(active)} active adapters, and one is trained. {MERGE}")
    if any(getattr(part, "merged", False) is True for part in given.modules()):
        raise _refused("its adapter is merged: call `unmerge_adapter`, or `merge_and_unload`")
    return str(active[0])


def _saved_adapter(given: Any, folder: Path) -> str:
    """Save the adapter, and its base too if it is another than that of its name."""
    with needing_peft("model"):
        from peft import get_peft_model_state_dict
    base, active = base_model(given), str(_active(given))
    named = str(base.name_or_path or "")

    def save_adapter(at: str, of: str) -> None:
        Path(at).mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(given.peft_config[active])
        config.base_model_name_or_path = of
        config.save_pretrained(at)
        weights = get_peft_model_state_dict(given, adapter_name=active, save_embedding_layers=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, Path(at, "adapter_model.safetensors"))

    def save_both() -> str:
        state = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if "lora_" not in name
        }
        base.save_pretrained(folder / "base", state_dict=state)
        save_adapter(str(folder), str((folder / "base").absolute()))
        return str(folder)

    at = _written(folder, lambda at: save_adapter(at, named))
    try:
        if named and _difference(given, at, active) is None:
            return at
    except (OSError, ValueError):
        pass  # the base of this name cannot be loaded
    return _first_equal("model", lambda at: _difference(given, at, active), None, save_both)


@torch.no_grad()
def _difference(given: Any, at: str, active: str, gets_adapter: bool = False) -> str | None:
    """Say how the policy that a folder loads differs from the given model."""
    theirs = {
        f"{name}.".replace(f".{active}.", f".{ADAPTER}.")[:-1]: weight
        for name, weight in given.named_parameters()
        if "lora_" not in name or _is_of(name, active)
    }
    double = any(weight.dtype == torch.float64 for weight in theirs.values())
    loaded = load_policy(at, dtype=torch.float64 if double else torch.float32)
    ours = dict(loaded.named_parameters())
    if odd := sorted(theirs.keys() ^ ours.keys()):
        return f"`{odd[0]}` is in one of the two alone"
    for name, weight in theirs.items():
        if not _equal(weight, ours[name]):
            return f"`{name}` has other values"
        if weight.requires_grad != ours[name].requires_grad and not gets_adapter:
            return f"`{name}` is trainable in one of the two alone"
        ours[name].data = ours[name].data.to(weight.dtype)  # to compute the same logits
    if _scales(given, active) != _scales(loaded, ADAPTER):
        return "its adapter has another scale (`lora_alpha`)"
    buffers = dict(base_model(loaded).named_buffers())
    for name, buffer in base_model(given).named_buffers():
        if name in buffers and not _equal(buffer, buffers[name], 1e-2):
            return f"`{name}` has other values"
    read = _read_settings(loaded)
    if others := [n for n, value in _read_settings(given).items() if value != read[n]]:
        return f"`{others[0]}` is another"
    ids = torch.arange(1, 17).unsqueeze(0) * 7919 % num_embeddings(given)
    dtypes = {weight.dtype for weight in theirs.values()}
    logits = []
    try:
        for model in (given, loaded):
            cast = torch.autocast(model.device.type, torch.bfloat16, enabled=len(dtypes) > 1)
            with evaluating(model), cast:
                seen = model(input_ids=ids.to(model.device), use_cache=False)
            logits.append(seen.logits.float().cpu())
    except (RuntimeError, ValueError, TypeError) as error:
        return f"its forward pass fails ({error})"
    want, got = logits
    most = max(_TOLERANCE.get(dtype, 0.05) for dtype in dtypes) * float(want.abs().max())
    if not (off := float((want - got).abs().max())) <= most:
        return f"its logits differ by {off:.2g}"
    return None


def _equal(theirs: Tensor, ours: Tensor, tolerance: float = 0.0) -> bool:
    if theirs.shape != ours.shape:
        return False
    theirs = theirs.detach().to(ours)
    if not tolerance or not ours.is_floating_point():
        return torch.equal(theirs, ours)
    return torch.allclose(theirs, ours, rtol=tolerance, atol=1e-6)


def _is_of(name: str, adapter: str) -> bool:
    """Whether this is a weight of an adapter."""
    return "lora_" in name and f".{adapter}." in f"{name}."


def _scales(policy: nn.Module, adapter: str) -> list[float]:
    scales = (getattr(layer, "scaling", None) for layer in policy.modules())
    return [one[adapter] for one in scales if isinstance(one, dict) and adapter in one]


def _read_settings(policy: nn.Module) -> dict[str, Any]:
    """Return what a run reads of the configurations."""
    found = getattr(base_model(policy), "generation_config", None)
    special: dict[str, Any] = {name: getattr(found, name, None) for name in _SPECIAL}
    return {**special, "max_position_embeddings": context_length(policy)}
