"""Two hosts that share no folder train as one, and what differs between them is refused by name."""

import re
import shutil
import sys

import pytest
import torch
from nodes.launching import reached
from safetensors.torch import load_file, save_file
from several_ranks import check_same

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("nodes")]
EXACT = {"precision": "64-true", "rounds": 3}


@pytest.mark.parametrize(("strategy", "address"), [("ddp", "address6"), ("fsdp2", "address")])
def test_they_are_one(nodes, strategy, address):
    """By IPv4 and by IPv6."""
    one = nodes.run("one", nodes.servers[:1], **EXACT)
    env = {"MASTER_ADDR": getattr(nodes.hosts[0], address)}
    check_same([one, nodes.run("two", strategy=strategy, env=env, **EXACT)], 1e-11)


def refused(ranks):
    """Return what ranks have printed that have all ended with an error."""
    assert all(rank.wait(120) for rank in ranks), [rank.said for rank in ranks]
    return "\n".join(rank.said for rank in ranks)


CLOSED = """table inet run {
    chain input {
        type filter hook input priority 0; policy drop;
        iif "lo" accept
        ct state established,related accept
        tcp dport %s accept
    }
}
"""
WRONG = {
    "name": (r"`MASTER_ADDR=h9` is not known here \(", {"MASTER_ADDR": "h9"}, None),
    "port": (
        r"nothing answers at h1:28999 \(.*Connection refused\)",
        {"MASTER_PORT": "28999"},
        None,
    ),
    "firewall": (r"nothing answers at h1:\d+ \(timed out\)", {}, "22"),
    "ports of Gloo": (r"h1:\d+ answers, but some ranks are not there", {}, "29600-29999"),
}


@pytest.mark.parametrize("what", WRONG)
def test_ranks_that_cannot_meet(nodes, firewall, what):
    told, env, open_ports = WRONG[what]
    if open_ports:
        firewall(CLOSED % open_ports)
    said = refused(nodes.start("run", strategy="ddp", second_env=env, waits=(3.0, 10.0)))
    waited = r"Rank %d on h%d has waited for the others for \d+ s: "
    assert re.search(waited % (1, 2) + told, said), said
    assert re.search(waited % (0, 1) + r"h1:\d+ answers, but some ranks are not there", said), said


def test_two_runs_with_one_port(nodes):
    """The second is refused, and the first is what it is alone."""
    run = {"strategy": "ddp", "env": {"MASTER_PORT": "28500"}, **EXACT}
    ranks = nodes.start("first", held="rollout", pause=30.0, **run)
    reached(nodes, ranks, "first.rollout")
    said = refused(nodes.start("second", waits=(3.0, 10.0), **run))
    assert "`MASTER_PORT=28500` cannot be opened on h1" in said
    whole = nodes.run("whole", strategy="ddp", **EXACT)
    assert torch.equal(nodes.result("first", ranks)["weights"], whole["weights"])


def test_other_weights_of_the_same_shape(nodes):
    file = nodes.hosts[1].path(f"{nodes.folder}/model/model.safetensors")
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[0] += 1e-3
    save_file(weights, file, {"format": "pt"})
    said = refused(nodes.start("run", strategy="fsdp2"))
    assert "Rank 1 on h2 has `weights=" in said and "Copy the model's folder of rank 0" in said


def test_a_host_without_the_model(nodes):
    shutil.rmtree(nodes.hosts[1].path(f"{nodes.folder}/model"))
    said = refused(nodes.start("run", strategy="ddp"))
    assert f"`model={nodes.folder}/model`: no such folder" in said
    assert re.search(r"Rank 1 \(process \d+ on h2\) has (failed|died)", said)


def test_other_data(nodes):
    other = {"data": {"train_data": [{"prompt": f"{i}+1=", "answer": "2"} for i in range(9)]}}
    said = refused(nodes.start("run", second=other, strategy="ddp"))
    assert "Rank 1 on h2 has `train_data=9 prompts (" in said, said
    assert "80 prompts (" in said


def test_other_settings(nodes):
    said = refused(nodes.start("run", second={"data": {"seed": 4}}, strategy="ddp"))
    assert "Rank 1 on h2 has `seed=4`, and rank 0 on h1 has `seed=3`" in said


def test_parts_of_a_checkpoint_on_two_disks(nodes):
    said = refused(nodes.start("run", strategy="folders"))
    assert "rank 1 on h2 does not see the folder of rank 0 on h1" in said
    assert not [*nodes.hosts[0].path(nodes.folder).glob(".shared-*")]


def test_a_checkpoint_that_one_host_has(nodes):
    """The run goes on where all have it, also on one host, and is refused where one has not."""
    whole = nodes.run("whole", strategy="ddp", **EXACT)
    path = f"{nodes.folder}/half.ckpt"
    nodes.run("half", strategy="ddp", **EXACT | {"rounds": 2}, save=path)
    again = {"ckpt_path": path, **EXACT}
    said = refused(nodes.start("again", strategy="ddp", **again))
    assert f"There is no checkpoint `{path}` on h2" in said
    first, second = (host.path(path) for host in nodes.hosts)
    shutil.copy(first, second)
    both = nodes.run("again", strategy="ddp", **again)
    assert torch.equal(both["weights"], whole["weights"])
    one = nodes.run("one", nodes.servers[:1], **again)
    assert float((one["weights"] - whole["weights"]).abs().max()) < 1e-11


def test_what_one_disk_has_is_decided_once(nodes):
    """Rank 0 sees the file that `ModelCheckpoint` has saved, and the other rank does not."""
    saves = {"ModelCheckpoint": {"dirpath": nodes.folder, "every_n_epochs": 1}}
    more = {"callbacks": saves | {"RoundCheckpoint": {"max_share": 1.0}}}
    ranks = nodes.start("run", strategy="ddp", **more)
    assert [rank.wait(100) for rank in ranks] == [0, 0]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")


def test_torchrun(both, day_ahead):
    """The command of the documentation, on the quick task; the hosts' clocks are a day apart."""
    meet = ("--master-addr=h1", "--master-port=29511", "-m", "lit_rlsched", "fit")
    run = (
        *("-c", "configs/quickstart.yaml", "--data.engine=TransformersEngine"),
        *("--data.prompts_per_round=2", "--data.num_generations=4"),
        *("--trainer.accelerator=cpu", "--trainer.num_nodes=2", "--trainer.devices=1"),
        *("--trainer.strategy=ddp", "--trainer.max_epochs=1", "--trainer.limit_val_batches=0"),
        *("--trainer.logger=false", "--trainer.default_root_dir=/tmp/torchrun"),
    )
    processes = [
        host.start(*TORCHRUN, f"--node-rank={number}", *meet, *run, env=day_ahead if number else {})
        for number, host in enumerate(both)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), said
    assert "round 1/1" in said[0] and "round 1/1" not in said[1]
