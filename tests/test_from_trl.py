"""The names of `docs/tutorials/from_trl.md` exist in TRL and here."""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from lightning import Trainer
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from lit_rlsched import GRPOModule, RolloutDataModule
from lit_rlsched.callbacks import RolloutLogger, RoundCheckpoint
from lit_rlsched.engines import VLLMEngine
from lit_rlsched.module import PolicyModule

TEXT = (Path(__file__).parents[1] / "docs/tutorials/from_trl.md").read_text()
PAGE = re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S)  # without its code
DEFAULTS = {f.name: f.default for f in fields(GRPOConfig)}
THEIRS = {*DEFAULTS, *inspect.signature(GRPOTrainer).parameters}
OWN_TO_GRPO = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(TrainingArguments)}
OWNERS = {
    "model": (GRPOModule, PolicyModule),
    "data": (RolloutDataModule,),
    "trainer": (Trainer,),
    **{cls.__name__: (cls,) for cls in (RolloutLogger, RoundCheckpoint, VLLMEngine)},
}


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def settings() -> dict[str, inspect.Parameter]:
    return {
        f"{owner}.{name}": parameter
        for owner, classes in OWNERS.items()
        for cls in classes
        for name, parameter in inspect.signature(cls).parameters.items()
    }


def test_every_name_of_trl_exists() -> None:
    mapped = [n for title in ("Batches", "Settings") for row in rows(title) for n in names(row[0])]
    missing = [name for row in rows("What is missing here") for name in names(row[1])]
    assert len(mapped) > 50 and len(missing) > 30
    assert not {*mapped, *missing} - THEIRS
    assert not {*mapped} & {*missing}


def test_every_setting_of_grpo_is_on_the_page() -> None:
    assert len(OWN_TO_GRPO) > 70
    assert not OWN_TO_GRPO - {*names(PAGE)}


def test_every_name_of_ours_exists() -> None:
    ours = [n for title in ("Batches", "Settings") for row in rows(title) for n in names(row[1])]
    ours += re.findall(r"`((?:model|data|trainer)\.\w+)`", PAGE)
    assert len(ours) > 50
    assert not {name for name in ours if "." in name} - {*settings()}


def test_what_is_not_said_to_differ_has_the_default_of_trl() -> None:
    """In rows with one name on each side and nothing in the third column."""
    ours, compared = settings(), []
    for row in rows("Settings"):
        pairs = list(zip(names(row[0]), names(row[1]), strict=False))
        if (len(row) > 2 and row[2].strip("| ")) or len(names(row[0])) != len(names(row[1])):
            continue
        for theirs, name in pairs:
            default = DEFAULTS.get(theirs, MISSING)
            if default is not MISSING and theirs != "min_p":  # ours is 0, which is off, too
                assert ours[name].default == default, theirs
                compared.append(theirs)
    assert len(compared) > 14, compared


def test_the_metrics_have_the_names_of_both(fit, tiny_model) -> None:
    shared = names(section("Metrics").split("|")[0])
    trainer, _, _ = fit(GRPOModule(tiny_model, beta=0.1), trainer={"max_epochs": 1})
    ours = {re.sub(r"^rewards/\w+/", "rewards/NAME/", name) for name in trainer.callback_metrics}
    assert not {*shared} - ours
    source = inspect.getsource(inspect.getmodule(GRPOTrainer))
    theirs = source.replace("{reward_func_name}", "NAME")
    by_transformers = {"loss", "learning_rate", "grad_norm"}
    assert not [
        name for name in shared if f'"{name}"' not in theirs and name not in by_transformers
    ]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"])
def test_the_losses_exist(loss_type: str) -> None:
    (row,) = (r for r in rows("Settings") if names(r[0]) == ["loss_type"])
    assert loss_type in names(row[2])
    GRPOModule(
        "model", loss_type=loss_type, **({"epsilon_high": 5.0} if loss_type == "cispo" else {})
    )
