"""The optimizer's state of a checkpoint, given to the weights by their names."""

from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lit_rlsched.settings import UsageError

_Names = list[list[str]]


def describe(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the class of an optimizer, and the names of the weights in its groups."""
    return {"class": type(optimizer).__name__, "groups": _names(optimizer, module)}


def adopt(
    optimizer: Optimizer, state: Mapping[str, Any], about: Mapping[str, Any], module: nn.Module
) -> dict[str, Any]:
    """Group the weights as a checkpoint does; return its state for the weights that are there."""
    ours, groups = _names(optimizer, module), state["param_groups"]
    if about.get("class", type(optimizer).__name__) != type(optimizer).__name__:
        raise UsageError(
            f"The checkpoint has the state of the optimizer `{about['class']}`, and this run has "
            f"`{type(optimizer).__name__}`. Return the former from `configure_optimizers`, or "
            "start a new run from the exported weights."
        )
    theirs = [group["params"] for group in groups]
    if not isinstance(next(chain(*theirs), None), str):  # which `FSDP2Strategy` writes itself
        theirs = about["groups"] if about else _guess(groups, ours, module)
    _warn_of_decay(optimizer, groups, ours, theirs)
    if theirs == ours:
        return dict(state)
    parameters = chain(*(group["params"] for group in optimizer.param_groups))
    weights = dict(zip(chain(*ours), parameters, strict=True))
    place = {name: i for i, names in enumerate(theirs) for name in names}
    kept = [[name for name in names if name in weights] for names in theirs]
    for names in ours:  # what is new goes where the rest of its group went
        beside = next((place[name] for name in names if name in place), 0)
        kept[beside] += [name for name in names if name not in place]
    for changed, what in (
        ([name for name in weights if name not in place], "are trained now, with a new state"),
        ([name for name in place if name not in weights], "are trained no more"),
    ):
        if changed:
            rank_zero_warn(
                f"The checkpoint was made while other weights were trained: {len(changed)} {what}; "
                f"the first is `{changed[0]}`."
            )
    optimizer.param_groups = [
        {**optimizer.param_groups[0], "params": [weights[name] for name in names]} for names in kept
    ]
    numbers = chain(*(group["params"] for group in groups))
    old = dict(zip(chain(*theirs), numbers, strict=True))
    new = {name: number for number, name in enumerate(chain(*kept))}
    return {
        "state": {
            number: state["state"][old[name]]
            for name, number in new.items()
            if old.get(name) in state["state"]
        },
        "param_groups": [
            {**group, "params": [new[name] for name in names]}
            for group, names in zip(groups, kept, strict=True)
        ],
    }


def _names(optimizer: Optimizer, module: nn.Module) -> _Names:
    names = {id(p): name for name, p in module.named_parameters()}
    number = count()
    return [
        [names.get(id(p)) or f"not of the module {next(number)}" for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _guess(groups: Sequence[Mapping[str, Any]], ours: _Names, module: nn.Module) -> _Names:
    """Return the names in the groups of a version that did not write them.

    There was one group, or a second one of biases and norms, which it knew by their dimensions.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    flat = [name for name, p in trained if p.ndim <= 1]
    others = [name for name, p in trained if p.ndim > 1]
    sizes = [len(group["params"]) for group in groups]
    for names in ([others, flat], ours, [[name for name, _ in trained]]):
        if [*map(len, names)] == sizes:
            return names
    raise UsageError(
        f"The checkpoint's optimizer has groups of {sizes} weights, and this run's has groups of "
        f"{[*map(len, ours)]}. Resume with the callbacks that froze or thawed weights and the "
        "`configure_optimizers` it was made with, or start a new run from the exported weights."
    )


def _warn_of_decay(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], ours: _Names, theirs: _Names
) -> None:
    """Warn if weights decay that this run would spare, as earlier versions let them."""
    decays = [
        {name for g, names in zip(of, by, strict=True) if g.get("weight_decay") for name in names}
        for of, by in ((optimizer.param_groups, ours), (groups, theirs))
    ]
    spared = [name for names in ours for name in names if name not in decays[0]]
    if decays[0] and (wrong := [name for name in spared if name in decays[1]]):
        rank_zero_warn(
            f"{len(wrong)} biases and norms decay in this run, because the checkpoint of an "
            f"earlier version has them in the group that does: the first is `{wrong[0]}`. In a "
            "new run they do not."
        )
