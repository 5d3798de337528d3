"""The names of `docs/tutorials/from_trl.md` exist in TRL and here, and wrong ones are answered."""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from lightning import Trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from lit_rlsched import GRPOModule, RLOOModule, RolloutDataModule
from lit_rlsched.callbacks import AsyncRollout, RolloutLogger, RoundCheckpoint
from lit_rlsched.data.tasks import Countdown
from lit_rlsched.engines import TransformersEngine, VLLMEngine
from lit_rlsched.module import PolicyModule
from lit_rlsched.rewards.functions import countdown_reward
from lit_rlsched.settings import UsageError, constructor_arguments, trl_names

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/tutorials/from_trl.md").read_text()
FILE = ROOT / "lit_rlsched/trl_names.csv"
PAGE = re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S)  # without its code
DEFAULTS = {f.name: f.default for f in fields(GRPOConfig)}
CONFIGS = (GRPOConfig, RLOOConfig, AsyncGRPOConfig)
TRAINERS = (GRPOTrainer, RLOOTrainer, AsyncGRPOTrainer)
CLASSES = (AsyncRollout, RLOOModule, RolloutLogger, RoundCheckpoint, VLLMEngine)
THEIRS = {f.name for config in CONFIGS for f in fields(config)}
THEIRS |= {name for cls in TRAINERS for name in inspect.signature(cls).parameters}
OWNERS = {
    "model": (GRPOModule, PolicyModule),
    "data": (RolloutDataModule,),
    "trainer": (Trainer,),
    **{cls.__name__: (cls,) for cls in CLASSES},
}


CURRENT = ["Batches", "Settings", "What is missing here"]


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def names(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(title: str) -> list[list[str]]:
    """Rows of a heading: TRL's names, ours and a remark."""
    return trl_names()[title]


def listed(*titles: str) -> list[str]:
    return [name for title in titles for row in rows(title) for name in row[0].split(", ")]


def settings() -> dict[str, inspect.Parameter]:
    return {
        f"{owner}.{name}": parameter
        for owner, classes in OWNERS.items()
        for cls in classes
        for name, parameter in inspect.signature(cls).parameters.items()
    }


def test_the_page_shows_the_table_of_the_code() -> None:
    assert ":file: ../../lit_rlsched/trl_names.csv\n" in TEXT
    assert all(len(row) == 3 for rows in trl_names().values() for row in rows)
    pages = {ROOT / "docs/tutorials" / to for to in re.findall(r"\]\(([^)#]+)", FILE.read_text())}
    assert len(pages) > 5 and all(page.is_file() for page in pages)


def test_every_name_of_trl_is_on_the_page_once() -> None:
    theirs = listed(*CURRENT)
    assert sorted(theirs) == sorted(THEIRS)
    assert [*trl_names()] == [*CURRENT, "Names of earlier versions"]
    assert not THEIRS & {*listed("Names of earlier versions")}


@pytest.mark.parametrize("name", listed(*trl_names()))
def test_a_wrong_name_is_answered_with_ours_or_with_why_there_is_none(name: str) -> None:
    every = [row for title in trl_names() for row in rows(title)]
    (row,) = (row for row in every if name in row[0].split(", "))
    ours = {one.rpartition(".")[2] for one in row[1].split(", ") if one}
    tried = 0
    for cls, args in MADE.items():
        if name in constructor_arguments(cls)[0]:
            continue
        tried += 1
        with pytest.raises(UsageError, match=rf"^`{cls.__name__}\({name}=...\)`: ") as refused:
            cls(*args, **{name: 1})
        said = str(refused.value)
        assert f"TRL's `{name}` " in said
        if ours:
            assert any(re.search(rf"\b{one}\b", said.partition(" is ")[2]) for one in ours), said
        else:
            assert "has no counterpart here: " in said and said.endswith(".")
        assert "](" not in said and "**" not in said
    assert tried >= 3


MADE = {
    GRPOModule: ["model"],
    RLOOModule: ["model"],
    RolloutDataModule: [[{"prompt": "1+1="}], [countdown_reward]],
    RolloutLogger: [],
    TransformersEngine: [],
    Countdown: [],
}


def test_a_class_of_the_user_may_take_any_name_and_passes_on_the_others() -> None:
    class Mine(RLOOModule):
        def __init__(self, model: str, **kwargs: object) -> None:
            self.args = kwargs.pop("args")
            super().__init__(model, **kwargs)

    mine = Mine("model", args=3, beta=0.5)
    assert mine.args == 3 and mine.hparams.beta == 0.5
    with pytest.raises(TypeError, match="max_grad_norm"):
        Mine("model", args=3, max_grad_norm=1.0)

    class Other(RolloutDataModule):
        def __init__(self, extra: int, **kwargs: object) -> None:
            super().__init__([{"prompt": "1+1="}], countdown_reward, **kwargs)

    assert Other(4, num_generations=2).hparams == {
        **RolloutDataModule([{"prompt": ""}], countdown_reward, num_generations=2).hparams,
        "extra": 4,
    }


def test_forms_of_trl() -> None:
    one = RolloutDataModule([{"prompt": "1+1="}], countdown_reward)
    path = "lit_rlsched.rewards.functions.countdown_reward"
    for same in ([countdown_reward], (countdown_reward,), path, [path]):
        other = RolloutDataModule([{"prompt": "1+1="}], same)
        assert (
            other.run.settings.rewards.names
            == one.run.settings.rewards.names
            == ["countdown_reward"]
        )
        assert other.run.settings.rewards.weights == [1.0]
    for given, meant in ((True, "group"), (False, "none"), ("batch", "batch")):
        module = GRPOModule("model", scale_rewards=given)
        assert module.hparams.scale_rewards == module.hparams_initial.scale_rewards == meant


def data(reward_funcs: object, **settings: object) -> RolloutDataModule:
    return RolloutDataModule([{"prompt": "1+1="}], reward_funcs, **settings)


def test_every_name_of_ours_exists() -> None:
    ours = [
        n for title in ("Batches", "Settings") for row in rows(title) for n in row[1].split(", ")
    ]
    ours += re.findall(r"`((?:model|data|trainer)\.\w+)`", PAGE)
    assert len(ours) > 50
    assert not {name for name in ours if "." in name} - {*settings()}


def test_what_is_not_said_to_differ_has_the_default_of_trl() -> None:
    """In rows with one name on each side and nothing in the third column."""
    ours, compared = settings(), []
    for row in rows("Settings"):
        theirs_here, ours_here = row[0].split(", "), row[1].split(", ")
        if row[2] or len(theirs_here) != len(ours_here):
            continue
        for theirs, name in zip(theirs_here, ours_here, strict=True):
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
    (row,) = (r for r in rows("Settings") if r[0] == "loss_type")
    assert loss_type in names(row[2])
    GRPOModule(
        "model", loss_type=loss_type, **({"epsilon_high": 5.0} if loss_type == "cispo" else {})
    )
