"""A model or tokenizer that was given as an object, as a folder that loads an equal one.

The engine, the reference model and a resumed run load the policy by its name.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_rlsched.settings import UsageError
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


def model_folder(given: Any, folder: Path, *, several: bool, gets_adapter: bool) -> str:
    """Return the name that loads an equal model, or `folder`, to which it is saved."""
    if hasattr(given, "peft_config") or getattr(given, "_hf_peft_config_loaded", False):
        raise _refused(
            "it has an adapter. Give the adapter's folder, as `save_pretrained` writes it, or what "
            "`merge_and_unload` returns"
        )
    if not isinstance(given, PreTrainedModel):
        raise _refused(
            f"it is a `{type(given).__name__}`: give a model of transformers, or a folder"
        )
    if getattr(given.config, "quantization_config", None) is not None:
        raise _refused("its weights are quantised, and these can be neither trained nor decoded")
    for name, weight in given.named_parameters():
        if weight.is_meta:
            raise _refused(f"`{name}` is on the device `meta` and has no values")
        if weight._backward_hooks:
            raise _refused(f"`{name}` has a hook that changes its gradient")
        if not (weight.requires_grad or gets_adapter):
            raise _refused(
                f"`{name}` is frozen; all weights are trained, or adapters: call "
                "`requires_grad_(True)` of the model, or give `peft_config`"
            )
    return _first_equal("model", given, _difference, None if several else folder)


def tokenizer_folder(given: Any, folder: Path, *, several: bool) -> str:
    """Return the name or folder of a tokenizer that equals a given one; see `model_folder`."""

    def difference(given: Any, at: str) -> str | None:
        inner = getattr(given, "tokenizer", given)  # of a processor
        loaded = load_tokenizer(at)
        ids, ours = (one(_PROBE)["input_ids"] for one in (inner, loaded))
        if list(ids) != list(ours) or len(inner) != len(loaded):
            return "its tokens are others"
        for name in ("chat_template", "eos_token_id", "bos_token_id", "all_special_ids"):
            if getattr(inner, name, None) != getattr(loaded, name, None):
                return f"its `{name}` is another"
        return None

    return _first_equal("processing_class", given, difference, None if several else folder)


def _refused(why: str, what: str = "model") -> UsageError:
    return UsageError(f"`{what}`: what is trained would not be the object that is given: {why}.")


def _first_equal(
    what: str, given: Any, difference: Callable[[Any, str], str | None], folder: Path | None
) -> str:
    """Return the object's name, or the folder to save it in, if that loads one without difference.

    Without a folder the object is not saved.
    """
    name = str(getattr(given, "name_or_path", "") or "")
    try:
        why = difference(given, name)
    except (UsageError, OSError, ValueError):
        why = f"`name_or_path={name}` loads nothing"
    if why is None:
        return name
    if folder is None:
        raise _refused(
            f"several processes load it by its name, and {why}. Save it with `save_pretrained` "
            "before the run, and give the folder",
            what,
        )
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    given.save_pretrained(str(folder))
    if (why := difference(given, str(folder))) is None:
        return str(folder)
    raise _refused(
        f"saved with `save_pretrained` and loaded again, {why}. Write the change into a folder "
        "that transformers loads, and give the folder",
        what,
    )


@torch.no_grad()
def _difference(given: PreTrainedModel, at: str) -> str | None:
    """Say how the policy that a folder loads differs from the given model."""
    theirs = dict(given.named_parameters())
    double = any(weight.dtype == torch.float64 for weight in theirs.values())
    loaded: Any = load_policy(at, dtype=torch.float64 if double else torch.float32)
    ours = dict(loaded.named_parameters())
    if odd := sorted(theirs.keys() ^ ours.keys()):
        return f"`{odd[0]}` is in one of the two alone"
    for name, weight in theirs.items():
        if not _equal(weight, ours[name]):
            return f"`{name}` has other values"
        ours[name].data = ours[name].data.to(weight.dtype)  # to compute the same logits
    buffers = dict(loaded.named_buffers())
    for name, buffer in given.named_buffers():
        if name in buffers and not _equal(buffer, buffers[name], 1e-2):
            return f"`{name}` has other values"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        want, got = (getattr(of.generation_config, name, None) for of in (given, loaded))
        if want != got:
            return f"`{name}` is another"
    if context_length(given) != context_length(loaded):
        return "`max_position_embeddings` is another"
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
