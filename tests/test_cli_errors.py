"""What the command line prints where a run is refused, and where it is not."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch  # noqa: F401  # its log handler keeps the stderr of the first import
import pytest

from lit_rlsched.__main__ import main
from lit_rlsched.settings import UsageError

ROOT = Path(__file__).parents[1]
BASE = [
    *("fit", "-c", "configs/quickstart.yaml", "--trainer.logger=false"),
    *("--data.engine=TransformersEngine", "--data.train_data.size=40", "--data.val_data.size=2"),
]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # what the CLI sets is unset after the test
    monkeypatch.setattr(sys, "argv", ["lit-rlsched"])


@pytest.fixture
def refused(capfd, tmp_path):
    """The one message of a refusal: what else is on stderr is progress, and no usage."""

    def refused(*args, base=BASE):
        where = [f"--trainer.default_root_dir={tmp_path}"]
        with pytest.raises(SystemExit) as stop:
            main([*base, *args, *(where if base is BASE else [])])
        assert stop.value.code == 2
        lines = capfd.readouterr().err.splitlines()
        assert lines[-1].startswith("tip: `lit-rlsched")
        assert not [line for line in lines if "usage:" in line or "Traceback" in line]
        first = next(i for i, line in enumerate(lines) if line.startswith("error: "))
        return "\n".join(lines[first:-1]).removeprefix("error: ")

    return refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--trainer.max_epochs=[1]", "`trainer.max_epochs=[1]`: must be a whole number or null."),
        (
            "--data={num_generations: 8, num_generations: 4}",
            "`num_generations` stands in line 1 already",
        ),
        ("--data.reward_funcs=[mine.score]", "`data.reward_funcs=mine.score`: No module named"),
        (
            "--data.reward_funcs=[lit_rlsched.rewards.functions.countdown_rewar]",
            "Did you mean `lit_rlsched.rewards.functions.countdown_reward`?",
        ),
        ("--config=configs/pod.yaml", "configs/pods.yaml`?"),
        ("--data.train_data=nowhere.jsonl", "There is no file `nowhere.jsonl`"),
        ("--model.model=./nowhere", "`model=./nowhere`: no such folder."),
        ("--ckpt_path=nowhere.ckpt", "nowhere.ckpt"),
        ("--ckpt_path=README.md", "`README.md` is not a Lightning checkpoint"),
        ("--ckpt_path=best", "only the process that trains knows"),
    ],
)
def test_one_message(refused, given, said):
    message = refused(given)
    assert said in message
    assert len(message.splitlines()) == 1


JUDGE = "lit_rlsched.rewards.JudgeReward"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "trainer: {devices: 3, strategy: ddp_spawn}",
            "`DDPStrategy` starts its 3 processes from this one, without its engine and data.",
        ),
        (
            f"data: {{reward_funcs: [{{class_path: {JUDGE}, init_args: {{modle: m}}}}]}}",
            "`data.reward_funcs.modle` of `JudgeReward`. Did you mean `data.reward_funcs.model`?",
        ),
        (
            f"data: {{reward_funcs: [{{class_path: {JUDGE}, init_args: {{model: 3.5}}}}]}}",
            "`data.reward_funcs.model=3.5`: must be a string.",
        ),
        (
            f"data: {{reward_funcs: [{{class_path: {JUDGE}s, init_args: {{model: m}}}}]}}",
            f"`data.reward_funcs={JUDGE}s`: module 'lit_rlsched.rewards' has no attribute ",
        ),
    ],
)
def test_one_message_about_a_file(refused, tmp_path, text, said):
    (tmp_path / "bad.yaml").write_text(text)
    message = refused("-c", str(tmp_path / "bad.yaml"))
    assert said in message and "\n" not in message


def test_what_a_callback_refuses_is_said_in_its_words(refused):
    one = "--trainer.callbacks+=AsyncRollout", "--trainer.callbacks.max_staleness=-1"
    said = refused(*one)
    assert said.startswith("`AsyncRollout(max_staleness=-1)`: must be a whole number, 1 or more")
    assert "\n" not in said


def test_commands(refused):
    assert "use fit, validate, test" in refused(base=["fits"])
    assert "`data.train_data`, `model` must be given" in refused(base=["fit"])
    assert "A command is missing: use fit, validate" in refused(base=[])


def test_the_tip_names_the_command_also_for_python_m(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lit_rlsched/__main__.py"])
    with pytest.raises(SystemExit):
        main(["fits"])
    assert "tip: `lit-rlsched --help`" in capfd.readouterr().err


def test_debug_shows_the_traceback_as_well(capfd):
    with pytest.raises(SystemExit) as stop:
        main([*BASE, "--data.prompts_per_round=0", "--debug"])
    error = capfd.readouterr().err
    assert stop.value.code == 2
    assert "Traceback (most recent call last):" in error and "check_ranges" in error
    assert (
        "\nerror: `RolloutDataModule(prompts_per_round=0)`: must be a whole number, 1 or more.\n"
        in error
    )


BUGGY = """
import dataclasses
from lightning import Callback
from lit_rlsched.callbacks import RolloutCallback
from lit_rlsched.settings import UsageError

class InSetup(Callback):
    def setup(self, *_, **__):
        raise ValueError("a bug of the user")

class Unpacks(Callback):
    def setup(self, trainer, *_, **__):
        run = trainer.datamodule.run  # our own code then trips over it
        run.settings = dataclasses.replace(run.settings, num_generations="x")

class InARound(RolloutCallback):
    def on_round_start(self, *_, **__):
        raise UsageError("the Trainer trains on 2 of them")
"""


@pytest.mark.parametrize("callback", ["InSetup", "Unpacks"])
def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch, callback):
    (tmp_path / "buggy.py").write_text(BUGGY)
    monkeypatch.syspath_prepend(tmp_path)
    folder = f"--trainer.default_root_dir={tmp_path}"
    with pytest.raises(ValueError, match=r"a bug of the user|Cannot specify ','") as error:
        main([*BASE, folder, f"--trainer.callbacks=[buggy.{callback}]"])
    assert not isinstance(error.value, UsageError)


def test_what_the_user_can_mend_is_one_message_in_a_round_too(tmp_path, monkeypatch, refused):
    (tmp_path / "buggy.py").write_text(BUGGY)
    monkeypatch.syspath_prepend(tmp_path)
    folder = f"--trainer.default_root_dir={tmp_path}"
    one = [folder, "--trainer.callbacks=[buggy.InARound]", "--data.val_data=null"]
    assert "trains on 2 of them" in refused(*one)


FAILING = """
def always(completions, **kwargs):
    raise KeyError("solution")
"""


@pytest.mark.mostly_slow("held_out0")
@pytest.mark.parametrize("held_out", [[], ["--data.val_data=null"]])
def test_a_reward_that_always_fails_ends_with_one_message(tmp_path, monkeypatch, refused, held_out):
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    folder = f"--trainer.default_root_dir={tmp_path}"
    message = refused(folder, "--data.reward_funcs=[failing.always]", *held_out)
    where = "of round 1" if held_out else "of held-out prompts"
    assert f"completions {where} has a reward" in message and "KeyError: 'solution'" in message


def test_warnings_are_printed_without_path_and_source(capfd, monkeypatch):
    def warn(*args, **kwargs):
        warnings.warn("mind this", stacklevel=1)
        raise SystemExit(0)

    monkeypatch.setattr("lit_rlsched.cli.main.RolloutCLI", warn)
    before = warnings.formatwarning
    monkeypatch.setattr("warnings.showwarning", _shown_as_python_does)
    with pytest.raises(SystemExit):
        main(["fit"])
    assert capfd.readouterr().err == "UserWarning: mind this\n"
    assert warnings.formatwarning is before


def _shown_as_python_does(message, category, filename, lineno, file=None, line=None):
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_run_with_vllm_prints_nothing_that_is_not_about_the_run(tmp_path):
    (tmp_path / "late.py").write_text(
        "from lightning import Callback\n"
        "class Late(Callback):\n"
        "    def on_fit_end(self, *_):\n"
        "        raise ValueError('a bug after training')\n"
    )
    command = Path(sys.executable).with_name("lit-rlsched")
    small = [
        "--data.train_data.size=8",
        "--data.val_data.size=2",
        "--data.prompts_per_round=2",
        "--data.max_completion_length=128",  # some end by themselves
        "--trainer.max_epochs=2",
        "--trainer.check_val_every_n_epoch=1",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.callbacks=[late.Late]",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    run = subprocess.run(
        [command, "fit", "-c", "configs/quickstart.yaml", *small],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    assert run.returncode == 1
    said, _, trace = run.stderr.partition("Traceback (most recent call last):")
    assert trace.rstrip().endswith("ValueError: a bug after training")
    for noise in ("sync_dist", "rank0", "[W", "site-packages", "deprecated", "Tip", "Warning"):
        assert noise not in said, said
    assert "rank0" not in trace
