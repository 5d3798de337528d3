"""What is said of a machine whose GPU cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_rlsched.cli.main import main
from lit_rlsched.engines import devices as node
from lit_rlsched.engines.devices import (
    refuse_missing_gpus,
    refuse_unseen_gpu,
    unseen,
    unseen_gpu,
    warn_of_unseen_gpu,
)
from lit_rlsched.settings import UsageError


@pytest.mark.parametrize(
    ("driver", "cuda", "text"),
    [
        (None, "13.0", None),
        ("580.65.06", "13.0", "prints the reason"),
        ("535.104.05", None, "it is a CPU build"),
    ],
)
def test_why_pytorch_sees_no_gpu(driver, cuda, text):
    said = unseen(driver, cuda)
    assert (said is None) if text is None else text in said


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder of programs, the only one on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def add(name, script="exit 0"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return add


def test_a_gpu_that_is_hidden_on_purpose_is_not_missed(machine, monkeypatch):
    assert unseen_gpu() is None
    machine("nvidia-smi", "echo 535.104.05; echo 535.104.05")
    if not torch.cuda.is_available():
        assert "PyTorch sees none" in str(unseen_gpu())
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert unseen_gpu() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch sees a GPU")
def test_a_run_is_told_before_it_starts(machine, monkeypatch, recwarn):
    refuse_unseen_gpu("gpu")
    warn_of_unseen_gpu("cpu")
    machine("nvidia-smi", "echo 535.104.05")
    refuse_unseen_gpu("auto")
    monkeypatch.setattr(torch.version, "cuda", None)
    warn_of_unseen_gpu("cpu")
    assert not recwarn, "a CPU build was installed on purpose"
    with pytest.raises(UsageError, match=r"`trainer\.accelerator=gpu`: .*it is a CPU build"):
        refuse_unseen_gpu("gpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(UserWarning, match=r"run is on the CPU\. .*PyTorch sees none"):
        warn_of_unseen_gpu("cpu")
    with pytest.raises(UsageError, match="prints the reason"):
        refuse_unseen_gpu("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch sees a GPU")
def test_the_command_line_says_so(machine, capsys, monkeypatch, tmp_path):
    machine("nvidia-smi", "echo 535.104.05")
    monkeypatch.chdir(Path(node.__file__).parents[2])
    folder = f"--trainer.default_root_dir={tmp_path}/run"
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "-c", "configs/quickstart.yaml", "--trainer.accelerator=gpu", folder])
    assert stopped.value.code == 2
    assert "PyTorch sees none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "wrong"),
    [
        *((devices, False) for devices in (2, "1", [0, 1], [], "0,1", "auto", -1, "-1")),
        *((devices, True) for devices in (3, "3", [0, 2], "0,2")),
    ],
)
def test_more_gpus_than_there_are(monkeypatch, devices, wrong):
    refuse_missing_gpus("gpu", devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuse_missing_gpus("cpu", devices)
    if not wrong:
        return refuse_missing_gpus("auto", devices)
    with pytest.raises(
        ValueError, match=r"`trainer\.devices=.*`: this machine has 2 GPUs. Use 2 o"
    ):
        refuse_missing_gpus("gpu", devices)


def test_the_command_line_looks_at_the_number_of_gpus(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lit_rlsched.cli.main.refuse_unseen_gpu", lambda accelerator: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.chdir(Path(node.__file__).parents[2])
    folder = f"--trainer.default_root_dir={tmp_path}/run"
    asks = ["--trainer.accelerator=gpu", "--trainer.devices=8"]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "-c", "configs/quickstart.yaml", *asks, folder])
    assert stopped.value.code == 2
    assert "error: `trainer.devices=8`: this machine has 1 GPU. Use 1 " in capsys.readouterr().err


def test_every_run_looks(fit, monkeypatch):
    devices = []
    monkeypatch.setattr("lit_rlsched.run.startup.warn_of_unseen_gpu", devices.append)
    fit(trainer={"max_epochs": 1})
    assert devices == ["cpu"]


@pytest.mark.parametrize(
    ("smi", "build", "said"),
    [
        (None, "cpu", ""),
        ("exit 9", "cpu", ""),
        ("echo 535.104.05", "cpu", "and the driver is 535.104.05: the CPU build is installed"),
        ("echo 580.65.06", "cuda", ""),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="vLLM has builds for Linux")
def test_the_build_that_make_installs(machine, smi, build, said):
    if smi is not None:
        machine("nvidia-smi", smi)
    script = [sys.executable, "-I", "-S", node.__file__]
    run = subprocess.run(script, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == build and said in run.stderr


def test_make_asks_for_it():
    makefile = (Path(node.__file__).parents[2] / "Makefile").read_text()
    assert "$(shell $(PYTHON) -I lit_rlsched/engines/devices.py)" in makefile
