"""What differs between two hosts is refused by name, before anything is trained wrongly."""

import shutil

import pytest
import torch
from nodes.launching import FOLDER, MODEL, alone, printed, result, torchrun
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow
FSDP2 = {"strategy": "fsdp2", "rounds": 2}


def refused(processes):
    """Return what hosts have printed that have all ended with an error."""
    said = printed(processes, timeout=120)
    assert all(process.returncode for process in processes), said
    return "\n".join(said)


def test_other_weights_of_the_same_shape(hosts):
    file = hosts[1].path(f"{MODEL}/model.safetensors")
    weights = load_file(file)
    next(iter(weights.values())).flatten()[0].add_(1e-3)
    save_file(weights, file, {"format": "pt"})
    said = refused(torchrun(hosts, "run", **FSDP2))
    assert "Rank 1 on h2 has `weights=" in said and "Copy the model's folder of rank 0" in said


def test_a_host_without_the_model(hosts):
    shutil.rmtree(hosts[1].path(MODEL))
    said = refused(torchrun(hosts, "run", strategy="ddp"))
    assert f"`model={MODEL}`: no such folder" in said and "h2" in said


def test_other_data(hosts):
    other = {"data": {"train_data": [{"prompt": "1+1=", "answer": "2"}] * 9}}
    said = refused(torchrun(hosts, "run", second=other, strategy="ddp"))
    assert "Rank 1 on h2 has `train_data=9 prompts (" in said and "80 prompts (" in said


def test_other_settings(hosts):
    said = refused(torchrun(hosts, "run", second={"data": {"seed": 4}}, strategy="ddp"))
    assert "Rank 1 on h2 has `seed=4`, and rank 0 on h1 has `seed=3`" in said


def test_parts_of_a_checkpoint_on_two_disks(hosts):
    said = refused(torchrun(hosts, "run", **FSDP2 | {"strategy": "folders"}))
    assert "rank 1 on h2 does not see the folder of rank 0 on h1" in said
    assert not [*hosts[0].path(FOLDER).glob(".shared-*")]


def test_a_checkpoint_that_one_host_has(hosts):
    """The run goes on where all have it, and is refused where one has not."""
    whole = {"strategy": "ddp", "precision": "64-true"}
    first = result(hosts, "whole", torchrun(hosts, "whole", rounds=4, **whole))
    torchrun_half = torchrun(hosts, "half", rounds=2, save=f"{FOLDER}/half.ckpt", **whole)
    result(hosts, "half", torchrun_half)
    again = {"rounds": 4, "ckpt_path": f"{FOLDER}/half.ckpt", **whole}
    said = refused(torchrun(hosts, "again", **again))
    assert f"There is no checkpoint `{FOLDER}/half.ckpt` on h2" in said
    shutil.copy(hosts[0].path(f"{FOLDER}/half.ckpt"), hosts[1].path(f"{FOLDER}/half.ckpt"))
    both = result(hosts, "again", torchrun(hosts, "again", **again))
    assert torch.equal(both["weights"], first["weights"])
    other = {"rounds": 4, "ckpt_path": f"{FOLDER}/half.ckpt", "precision": "64-true"}
    one = result(hosts[1:], "one", alone(hosts[1], "one", **other))  # on another number of hosts
    assert float((one["weights"] - first["weights"]).abs().max()) < 1e-11
