"""Checks of a checkpoint's contents against the run that resumes from it.

Each check raises a `CheckpointError` or `ValueError` that names both values and a fix.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lit_rlsched import __version__
from lit_rlsched.run.saving.checkpoints import CheckpointError
from lit_rlsched.settings import UsageError
from lit_rlsched.types import Completion, Group

FORMAT = 1
"""Format of the data module's state. Format 0, before formats had numbers, can be read too."""

SAME_ON_RESUME = (
    "seed",
    "prompts_per_round",
    "num_generations",
    "steps_per_round",
    "num_iterations",
)
"""Settings of the data module that decide what is drawn."""

_FIX = "or start a new run in another folder."


def written() -> dict[str, Any]:
    """Return the format of a state, which version writes it, and when."""
    return {"format": FORMAT, "version": __version__, "unix_seconds": time.time()}


def check_resumable(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of weights without the optimizer's state."""
    if "optimizer_states" not in checkpoint:
        raise CheckpointError(
            "The checkpoint holds the weights alone (`ModelCheckpoint(save_weights_only=True)`), "
            "and a run cannot resume without the state of the optimizer. Resume from a checkpoint "
            "of the whole run."
        )


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


def check_has_state(ckpt_path: Any, datamodule: object) -> None:
    """Refuse a checkpoint that brought no state for a data module."""
    if ckpt_path is not None:
        raise CheckpointError(
            f"`{ckpt_path}` has no state of `{type(datamodule).__qualname__}`: no prompts, pool, "
            "round or counters to resume. Resume from a checkpoint of the whole run, or start a "
            "new run without `ckpt_path`."
        )


def check_format(state: Mapping[str, Any]) -> None:
    """Refuse the state of a data module that an unknown version wrote."""
    theirs = state.get("format", 0)
    if theirs not in range(FORMAT + 1):
        raise CheckpointError(
            f"The checkpoint has format {theirs}, written by lit_rlsched {state.get('version')}, "
            f"and this version reads formats 0 to {FORMAT}. Install the version that wrote it, "
            f"{_FIX}"
        )


def check_same_settings(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a run in which a setting of the checkpoint has another value."""
    for name, theirs in saved.items():
        if settings[name] != theirs:
            raise UsageError(
                f"The checkpoint was made with `{name}={theirs}`, this run has "
                f"`{name}={settings[name]}`. Resume with the value of the checkpoint, {_FIX}"
            )


def check_drawn(
    packed: Sequence[Mapping[str, Any]],
    saved_funcs: Sequence[str] | None,
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
    scores = [row for part in packed for row in part["scores"] if row is not None]
    same_number = all(len(row) == len(reward_funcs) for row in scores)
    same_names = saved_funcs is None or list(saved_funcs) == list(reward_funcs)
    if scores and not (same_number and same_names):
        theirs = f"{len(scores[0])} of them" if saved_funcs is None else list(saved_funcs)
        raise UsageError(
            f"The checkpoint was made with `reward_funcs={theirs}` in the middle of a pool or a "
            f"round, this run has `reward_funcs={list(reward_funcs)}`: completions in it have "
            f"scores of the former only. Resume with the same functions in the same order, {_FIX}"
        )


def check_whole_groups(pool: Iterable[Group], num_generations: int) -> None:
    """Refuse a pool of incomplete groups, for a run that compares completions of a group."""
    if any(len(group.completions) < num_generations for group in pool):
        raise UsageError(
            "The checkpoint was made in the middle of a pool from which single completions "
            "were trained on, and this run compares each completion with its whole group. "
            f"Resume with `advantage='reinforce++'` and without `DownSampling`, {_FIX}"
        )


def complete(
    completions: Iterable[Completion],
    decode: Callable[[Sequence[int]], str],
    keeps_drafts: bool,
) -> None:
    """Add the texts that a checkpoint does not hold, and drop drafts that the run cannot use."""
    for completion in completions:
        if not keeps_drafts:
            completion.draft = None
        if completion.finished:
            completion.text = decode(completion.own_ids)
