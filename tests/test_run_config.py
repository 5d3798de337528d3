"""What loggers are told of a run's settings."""

import copy
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_rlsched import GRPOModule, RolloutDataModule, callbacks, engines
from lit_rlsched.callbacks import (
    DownSampling,
    LengthPrediction,
    MicroGroupSampling,
    RolloutCallback,
    SortedBatching,
    TailBatching,
)
from lit_rlsched.cli.folder import redacted
from lit_rlsched.data.tasks import Countdown, HubDataset
from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.run import run_config as logged
from lit_rlsched.run.run_config import (
    algorithm,
    commit,
    run_config,
    shared_config,
    versions,
)
from lit_rlsched.scheduling.length_prediction import PromptHistory
from lit_rlsched.settings import plain
from lit_rlsched.text import hide_keys, without_secrets

# Arguments of a constructor.


def test_every_argument_is_remembered_defaults_included():
    assert SortedBatching(2, mode="partial").init_args == {
        "pool_rounds": 2,
        "update_prompts": None,
        "mode": "partial",
        "max_staleness": None,
        "oversubscribe": None,
        "mask_stale_tokens": False,
    }
    assert MicroGroupSampling(memory_budget="2GiB").init_args["memory_budget"] == "2GiB"


def test_each_scheduling_callback_remembers_what_its_constructor_takes():
    required = {"MicroGroupSampling": {"slots": 4}, "DownSampling": {"keep": 2}}
    deciding = [getattr(callbacks, name) for name in callbacks.__all__]
    deciding = [kind for kind in deciding if getattr(kind, "sets", None)]
    assert len(deciding) > 10
    for kind in deciding:
        made = kind(**required.get(kind.__name__, {}))
        assert [*getattr(made, "init_args", {})] == [*inspect.signature(kind).parameters], kind


def test_the_class_of_the_object_has_the_last_word():
    class Mine(TailBatching):
        def __init__(self, ratio):
            super().__init__(prompt_ratio=ratio)

    class Same(Mine):
        pass

    assert Same(1.5).init_args == {"ratio": 1.5}
    assert not hasattr(RolloutCallback(), "init_args")


def test_nested_objects_are_plain():
    assert plain(ProcessEngine(TransformersEngine())) == {
        "class": "ProcessEngine",
        "engine": {"class": "TransformersEngine"},
        "weight_transfer": None,
    }
    args = LengthPrediction(PromptHistory()).init_args
    assert args["predictor"]["class"] == "PromptHistory"
    assert plain({"a": (1, Path("b")), 2: len, "c": range}) == {
        "a": [1, "b"],
        "2": "builtins.len",
        "c": "builtins.range",
    }
    assert plain([*range(1000)]) == "1000 entries"
    assert plain(object()) == {"class": "object"}


def test_objects_are_copied_and_sent_to_processes_as_before():
    for made in (DownSampling(keep=2), VLLMEngine(kv_cache_gib=1.5), Countdown(size=3)):
        assert pickle.loads(pickle.dumps(made)).init_args == made.init_args
        assert copy.deepcopy(made).init_args == made.init_args
    with pytest.raises(TypeError, match=r"DownSampling.__init__\(\) missing 1 required"):
        DownSampling()


# Secrets.


def test_secrets_are_removed_whatever_they_are_called(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "canary-1234")
    settings = {
        "hf_token": "a",
        "engine_kwargs": {"api_key": "b", "max_tokens": 4, "stop": ["x canary-1234"]},
        "request_kwargs": {"extra_headers": {"X-Mine": "c"}, "user": "me"},
        "base_url": "https://me:pass@host/v1",
        "other": ["Bearer abc", "sk-" + "a" * 20, "hf-internal-testing/tiny", None, 1.5],
        "reward_env_vars": ["OPENAI_API_KEY"],
    }
    assert without_secrets(settings) == {
        "hf_token": "[redacted]",
        "engine_kwargs": {
            "api_key": "[redacted]",
            "max_tokens": 4,
            "stop": ["x [redacted]"],
        },
        "request_kwargs": {"extra_headers": {"X-Mine": "[redacted]"}, "user": "me"},
        "base_url": "https://[redacted]@host/v1",
        "other": ["[redacted]", "[redacted]", "hf-internal-testing/tiny", None, 1.5],
        "reward_env_vars": ["OPENAI_API_KEY"],
    }


@given(st.lists(st.text("xyz0%+/:@=-", min_size=1), min_size=1, max_size=3))
def test_the_query_of_an_address_keeps_its_names_alone(values: list[str]) -> None:
    query = "&".join(f"n{place}={value}" for place, value in enumerate(values))
    hidden = "&".join(f"n{place}=[redacted]" for place in range(len(values)))
    text = f"GET 'https://host/v1?{query}#top' has failed"
    assert hide_keys(text) == f"GET 'https://host/v1?{hidden}#[redacted]' has failed"


def test_a_configuration_without_secrets_stays_as_the_user_wrote_it():
    text = "# mine\na: {b: 1}\n"
    assert redacted(text) == text
    assert yaml.safe_load(redacted("a: {api_key: x, b: 1}")) == {
        "a": {"api_key": "[redacted]", "b": 1}
    }


# The run.


def score(prompts, completions, **columns):
    return [0.0] * len(prompts)


def make_run(tmp_path, module, *callbacks, **settings):
    data = RolloutDataModule(
        Countdown(size=6), [score], engine=SimpleEngine(), seed=7, val_data="v.jsonl", **settings
    )
    data.run.rows = {"train": [{}] * 6, "val": [{}] * 2}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
    )
    trainer.strategy.connect(module)
    trainer.datamodule, data.trainer = data, trainer
    return trainer, data


class SimpleEngine(engines.SimulatedEngine):
    def __init__(self, threads: int = 2) -> None:
        super().__init__()


@pytest.mark.filterwarnings("ignore")
def test_what_ranks_must_have_in_common_is_compared_by_value(tmp_path):
    """Ranks get it from each other pickled, so an object that is equal to itself alone would be
    refused."""
    every = [
        LengthPrediction(PromptHistory()),
        SortedBatching(2),
        MicroGroupSampling(4),
    ]

    def shared(rate=1e-6, betas=(0.9, 0.99), many=every):
        module = GRPOModule("Qwen/Qwen3-0.6B", learning_rate=rate, betas=betas)
        trainer, data = make_run(tmp_path, module, *many)
        return shared_config(trainer, data.run.settings)

    ours = shared()
    assert pickle.loads(pickle.dumps(ours)) == ours == shared()
    assert ours["learning_rate"] == 1e-6 and ours["trainer.precision"] == "32-true"
    assert ours["schedule.LengthPrediction.predictor.class"] == "PromptHistory"
    assert "commit" not in ours and "engine.threads" not in ours
    for other in (shared(rate=1e-5), shared(betas=(0.9, 0.95)), shared(many=every[:2])):
        assert other != ours


@pytest.mark.filterwarnings("ignore")
def test_two_schedules_have_different_configurations(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    module = GRPOModule("Qwen/Qwen3-0.6B", beta=0.1)
    trainer, data = make_run(tmp_path, module, SortedBatching(2), MicroGroupSampling(4))
    config = run_config(trainer, data.run.settings, data.run.rows)
    assert [*config["schedule"]] == ["SortedBatching", "MicroGroupSampling"]
    assert config["schedule"]["SortedBatching"]["pool_rounds"] == 2
    assert config["engine"] == {"class": "SimpleEngine", "threads": 2}
    assert config["train_data"]["rows"] == 6
    assert config["train_data"]["source"]["class"] == "Countdown"
    assert config["val_data"] == {"source": "v.jsonl", "rows": 2}
    assert config["reward_funcs"] == {"score": 1.0}
    assert (config["seed"], config["seed_everything"]) == (7, 5)
    settings = config["trainer"]
    assert (settings["accelerator"], settings["precision"]) == ("cpu", "32-true")
    assert (settings["max_epochs"], settings["gradient_clip_val"]) == (3, 0.5)
    trainer, other = make_run(tmp_path, module)
    plain_run = run_config(trainer, other.run.settings, other.run.rows)
    assert plain_run["schedule"] == {} and plain_run["algorithm"] == "grpo"
    assert data.hparams_initial["schedule"] == config["schedule"]
    assert data.hparams_initial["num_generations"] == 8
    assert "schedule" not in data.hparams, "a checkpoint holds the settings of the class alone"


def test_names_say_what_a_run_does():
    assert algorithm(GRPOModule("tiny")) == "grpo"
    assert algorithm(GRPOModule("tiny", advantage="reinforce++")) == "reinforce++"
    assert algorithm(SimpleNamespace(hparams={})) == "simplenamespace"


@pytest.mark.filterwarnings("ignore")
def test_a_name_that_the_module_has_too_is_left_to_it(tmp_path):
    class Own(GRPOModule):
        def __init__(self, model: str, engine: str = "mine") -> None:
            super().__init__(model)
            self.save_hyperparameters()

    _, data = make_run(tmp_path, Own("tiny"))
    assert "engine" not in data.hparams_initial and "schedule" in data.hparams_initial


def test_versions_and_commit(tmp_path, monkeypatch):
    assert {"lit_rlsched", "torch", "transformers", "lightning"} <= versions().keys()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None

    def git(*args):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *args], check=True, capture_output=True)

    git("init")
    Path("a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    git("tag", "v1")
    assert re.fullmatch(r"[0-9a-f]{40}", commit())
    Path("a").write_text("2")
    assert commit().endswith("-dirty")
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_a_run_from_python_writes_them(fit, tmp_path):
    loggers = [CSVLogger(tmp_path, name="csv")]
    if board := find_spec("tensorboardX"):
        loggers.append(TensorBoardLogger(tmp_path, name="board"))
    fit(callbacks=[SortedBatching(2)], trainer={"logger": loggers, "max_epochs": 1})
    for name in ("csv", "board") if board else ("csv",):
        written = yaml.full_load((tmp_path / name / "version_0/hparams.yaml").read_text())
        assert written["schedule"]["SortedBatching"]["pool_rounds"] == 2
        assert written["engine"]["class"] == "TransformersEngine"
        assert written["train_data"] == {"source": "80 rows", "rows": 80}
        assert written["reward_funcs"] == {"digits": 1.0}
        assert written["seed"] == 3 and written["learning_rate"] == 1e-3
    if board:  # what TensorBoard shows under HPARAMS, and one of the metrics
        (events,) = (tmp_path / "board/version_0").glob("events.*")
        for name in (b"schedule/SortedBatching/pool_rounds", b"engine/class", b"batch/positions"):
            assert name in events.read_bytes(), name


def test_nothing_needs_wandb(fit, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import raises
    importlib.reload(logged)
    trainer, _, data = fit(trainer={"logger": CSVLogger(tmp_path), "max_epochs": 1})
    logged.log_artifact(trainer, "a", "b", tmp_path)
    assert data.state_dict()["wandb_ids"] == []


def test_a_hub_task_is_named():
    assert plain(HubDataset("org/name"))["name"] == "org/name"
