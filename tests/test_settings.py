"""Every number and every word of a configuration is checked, by whatever it is called."""

import inspect
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule, callbacks, engines
from lit_rlsched.cli.simulate import simulate
from lit_rlsched.data import tasks
from lit_rlsched.rewards import JudgeReward, RewardScheduler
from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.scheduling.recorded_lengths import LogNormalLengths
from lit_rlsched.scheduling.token_conditioned import TokenConditioned
from lit_rlsched.settings import (
    KnownArguments,
    Range,
    UsageError,
    constructor_arguments,
    ranges,
)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0]


NEEDED: dict[type, dict[str, Any]] = {
    GRPOModule: {"model": "m"},
    RLOOModule: {"model": "m"},
    RolloutDataModule: {"train_data": [{"prompt": "1"}], "reward_funcs": [reward]},
    RewardScheduler: {"reward_funcs": [reward]},
    JudgeReward: {"model": "m", "base_url": "http://here/v1"},
    callbacks.DownSampling: {"keep": 4},
    callbacks.MicroGroupSampling: {"slots": 4},
}
UNCHECKED = {"key"}
"""Settings that take any word when they are made."""
OTHERS = [LogNormalLengths, PromptHistory, TokenConditioned, tasks.Countdown]


def parameters(kind: type) -> dict[str, inspect.Parameter]:
    found: dict[str, inspect.Parameter] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("lit_rlsched") and "__init__" in vars(base):
            found |= inspect.signature(base.__init__).parameters
    return found


NAMED = [getattr(home, name) for home in (callbacks, engines) for name in home.__all__]
KINDS = [*NEEDED, *(kind for kind in NAMED if kind not in NEEDED), *OTHERS]


def floats() -> Iterator[tuple[type, str, Any]]:
    for kind in KINDS:
        for name, parameter in parameters(kind).items():
            annotation = str(parameter.annotation)
            if "float" not in annotation or "Callable" in annotation:
                continue
            for bad in (float("nan"), float("inf")):
                if "dict" in annotation:
                    yield kind, name, {2: bad}
                elif "tuple" in annotation or "list" in annotation:
                    yield kind, name, (0.0, bad)
                else:
                    yield kind, name, bad


ALL = list(floats())


def test_the_settings_that_matter_are_among_them() -> None:
    assert {
        *("learning_rate", "betas", "epsilon", "epsilon_high", "delta", "beta", "weight_decay"),
        *("importance_sampling_clip_max", "gradient_clip_val", "temperature", "top_p", "min_p"),
        *("reward_weights", "reward_timeout", "val_temperature", "oversubscribe", "per_domain"),
        *("scale", "prompt_ratio", "reward_range", "score_range", "kv_cache_gib"),
    } <= {name for _, name, _ in ALL}


@pytest.mark.parametrize(("kind", "name", "value"), ALL, ids=lambda v: getattr(v, "__name__", None))
def test_what_is_not_finite_is_refused_by_name(kind: type, name: str, value: Any) -> None:
    if name == "reward_weights":
        value = [float("nan")]
    with pytest.raises(UsageError, match=rf"\b{name}=.*(nan|inf)"):
        kind(**NEEDED.get(kind, {}) | {name: value})


def words() -> Iterator[tuple[type, str, tuple[Any, ...]]]:
    for kind in KINDS:
        accepted = constructor_arguments(kind)[0]
        for name, parameter in parameters(kind).items():
            for hint in (parameter.annotation, *get_args(parameter.annotation)):
                if get_origin(hint) is Literal and name in accepted and name not in UNCHECKED:
                    yield kind, name, get_args(hint)


@pytest.mark.parametrize(("kind", "name", "choices"), words())
def test_a_word_that_is_no_choice_is_refused_with_the_choices(kind, name, choices):
    with pytest.raises(UsageError, match=rf"\b{name}='nonsense'") as refused:
        kind(**NEEDED.get(kind, {}) | {name: "nonsense"})
    assert all(str(choice) in str(refused.value) for choice in choices)


SCALARS: dict[type, tuple[Any, ...]] = {
    int: ("three", 1.5, True),
    float: ("three", True, [1.0]),
    bool: (1.5, "maybe"),
    str: (3,),
}


def scalars() -> Iterator[tuple[type, str, Any]]:
    """Values of another type; an object may be given for a class."""
    for kind in (kind for kind in KINDS if issubclass(kind, KnownArguments)):
        accepted = constructor_arguments(kind)[0]
        for name, parameter in parameters(kind).items():
            hints = get_args(parameter.annotation) or (parameter.annotation,)
            if name not in accepted or not {*hints} <= {*SCALARS, type(None)}:
                continue
            for value in (v for hint in SCALARS if hint in hints for v in SCALARS[hint]):
                if type(value) not in hints and not (type(value) is int and float in hints):
                    yield kind, name, value


@pytest.mark.parametrize(("kind", "name", "value"), scalars())
def test_a_value_of_another_type_is_refused_by_name(kind, name, value):
    with pytest.raises(UsageError, match=rf"\b{name}"):
        kind(**NEEDED.get(kind, {}) | {name: value})


SIZES = {"memory_budget", "reward_memory_limit", "memory_limit", "lengths"}
"""Not one number: bytes, which may also be a string such as `4GiB`, and lengths of many kinds."""
UNNAMED = {engines.EngineSpec, callbacks.RolloutProgressBar}
"""Not in the table: the first is no setting, and those of the second are Lightning's."""


def numbers() -> Iterator[tuple[type, str]]:
    """Every number that a class of ours takes."""
    for kind in (kind for kind in KINDS if kind not in UNNAMED):
        accepted = constructor_arguments(kind)[0]
        for name, parameter in parameters(kind).items():
            hints = [parameter.annotation, *get_args(parameter.annotation)]
            within = [of for hint in hints for of in (hint, *get_args(hint))]
            if (int in within or float in within) and name in accepted and name not in SIZES:
                yield kind, name


def range_of(kind: type, name: str) -> Range | None:
    found = (ranges().get(base.__name__, {}).get(name) for base in kind.__mro__)
    return next((each for each in found if each is not None), None)


NUMBERS = [
    *(math.nan, math.inf, -math.inf, -1, -1.0, 0, 0.0, 1, 0.5, True, "x", "1"),
    *(1e300, -1e300, 1e-300, -1e-300, 2**31, 10**30, -(10**30), 10**400),
]
"""What somebody may give for a number."""
ANY = {"seed", "val_accuracy_threshold", "reward_weights", "score_range", "reward_range"}
"""Settings without a bound of their own."""


@pytest.mark.parametrize(("kind", "name"), numbers())
def test_every_number_has_a_range_and_keeps_to_it(kind, name):
    """A value is refused with its name, or it is in a range that says so."""
    allowed = range_of(kind, name)
    assert allowed is not None, "write a row of `lit_rlsched/ranges.csv`"
    assert name in ANY or not allowed.holds(-1)
    annotation = str(parameters(kind)[name].annotation)
    for number in NUMBERS:
        value: Any = number
        if any(word in annotation for word in ("tuple", "list", "Sequence")):
            value = [number] * (2 if "tuple" in annotation else 1)
        elif "dict" in annotation:
            value = {2: number}
        settings = NEEDED.get(kind, {}) | {name: value}
        if not allowed.holds(value):
            with pytest.raises(UsageError, match=rf"\b{name}="):
                kind(**settings)
            continue
        assert allowed.whole or abs(number) <= 1e12
        with suppress(UsageError):  # of a combination
            kind(**settings)


@pytest.mark.parametrize("name", ["learning_rate", "lora_alpha", "betas"])
def test_ranges_hold_for_classes_of_ones_own_and_for_those_alone(name):
    class Own(GRPOModule):
        def __init__(self, model: str, n: int = 3, **kwargs: Any) -> None:
            super().__init__(model, **kwargs)

    class RoundCheckpoint(callbacks.RolloutCallback):
        """Has the name of one of ours, and none of its settings."""

        def __init__(self, keep: int) -> None:
            pass

    RoundCheckpoint(keep=-1)
    Own("m", n=-1)
    with pytest.raises(UsageError, match=rf"`Own\({name}=.*-1"):
        Own("m", **{name: (-1.0, 0.9) if name == "betas" else -1})


def test_each_row_of_the_ranges_is_of_a_setting():
    of_kinds = {base.__name__: base for kind in KINDS for base in kind.__mro__}
    of_kinds["ReasoningGym"] = tasks.ReasoningGym
    for owner, rows in ranges().items():
        named = simulate if owner == "simulate" else of_kinds[owner].__init__
        assert rows.keys() <= inspect.signature(named).parameters.keys()
        known = inspect.signature(named).parameters
        for name, allowed in rows.items():
            default = known[name].default
            assert default is inspect.Parameter.empty or allowed.holds(default)


class Open(callbacks.TailBatching):
    """Of one's own, with all kinds of parameters."""

    def __init__(self, *names: str, pair=(1, 2), n: float = None, **more: float):  # type: ignore  # noqa: RUF013
        super().__init__(**more)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (RolloutDataModule, {"reward_weights": np.array([1.0]), "prompts_per_round": np.int64(4)}),
        (RolloutDataModule, {"reward_weights": (1,), "temperature": np.float32(0.5)}),
        (RolloutDataModule, {"seed": torch.tensor(3), "reward_memory_limit": 4 * 2**30}),
        (RolloutDataModule, {"chat_template_kwargs": OrderedDict(enable_thinking=False)}),
        (GRPOModule, {"lora_rank": 2, "lora_target_modules": {"q_proj"}, "learning_rate": 1}),
        (callbacks.RoundCheckpoint, {"dirpath": Path("here")}),
        (callbacks.DownSampling, {"early_stop": True, "reward_range": [0.0, 2.0]}),
        (Open, {"pair": (3, 4), "n": None, "prompt_ratio": 1.5}),
    ],
)
def test_what_is_as_good_as_the_annotation_is_accepted(kind, settings) -> None:
    kind(**NEEDED.get(kind, {}) | settings)
    Open("x", "y")


class Mine(callbacks.SortedBatching):
    """Of one's own: what reaches the package's constructor counts."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode={"mine": "nonsense"}.get(mode, mode))  # type: ignore[arg-type]


class MyModule(GRPOModule):
    def __init__(self, model: str) -> None:
        super().__init__(model, advantage="nonsense")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: Mine("mine"), lambda: MyModule("m")])
def test_what_a_subclass_passes_on_is_checked_too(make) -> None:
    Mine("partial")
    with pytest.raises(UsageError, match=r"='nonsense'\)` is unknown. Use one of"):
        make()


def test_rows_are_no_settings() -> None:
    rows = [{"prompt": "1", "answer": float("nan")}]
    engine = engines.SimulatedEngine()
    RolloutDataModule(rows, [reward], val_data=rows, engine=engine)
