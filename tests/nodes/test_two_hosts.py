"""Two hosts that share no folder train as one, and what differs between them is refused by name."""

import re
import shlex
import shutil
import sys
from pathlib import Path

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
    ranks = nodes.start("first", held="rollout", pause=15.0, **run)
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


@pytest.mark.parametrize("stage", ["train", "val"])
def test_other_data(nodes, stage):
    read = {f"{stage}_data": [{"prompt": f"{i}+1=", "answer": "2"} for i in range(9)]}
    fewer = {name: rows[:8] for name, rows in read.items()}
    said = refused(nodes.start("run", second={"data": read}, data=fewer, strategy="ddp"))
    assert f"Rank 1 on h2 has `{stage}_data=9 prompts (" in said, said
    assert "8 prompts (" in said


@pytest.mark.parametrize(
    ("kind", "name", "others", "ours"),
    [
        ("data", "seed", 4, 3),
        ("module", "learning_rate", 0.001, 0.0003),
        ("callbacks", "schedule.MicroGroupSampling.slots", 2, 4),
    ],
)
def test_other_settings(nodes, kind, name, others, ours):
    def given(value):
        set_to = {name.split(".")[-1]: value}
        return {kind: {"MicroGroupSampling": set_to} if kind == "callbacks" else set_to}

    said = refused(nodes.start("run", second=given(others), strategy="ddp", **given(ours)))
    assert f"Rank 1 on h2 has `{name}={others}`, and rank 0 on h1 has `{name}={ours}`" in said, said


def test_a_checkpoint_that_one_host_has(nodes):
    """The run goes on where all have it, also on one host, and is refused where one has not."""
    whole = nodes.run("whole", strategy="ddp", **EXACT)
    path = f"{nodes.folder}/half.ckpt"
    nodes.run("half", strategy="ddp", **EXACT | {"rounds": 2}, save=path)
    again = {"ckpt_path": path, **EXACT}
    first, second = (host.path(path) for host in nodes.hosts)
    said = refused(nodes.start("again", strategy="ddp", **again))
    assert f"There is no checkpoint `{path}` on h2" in said
    said = refused(nodes.start("again", strategy="ddp", second={"ckpt_path": None}, **again))
    assert "Rank 1 on h2 has `ckpt_path=None`, and rank 0 on h1 has `ckpt_path=half.ckpt (" in said
    older = torch.load(first, weights_only=False)
    torch.save(older | {"global_step": older["global_step"] - 1}, second)
    said = refused(nodes.start("again", strategy="ddp", **again))
    assert re.search(r"Rank 1 on h2 has `ckpt_path=half.ckpt \(\w{8}\)`", said), said
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


PAGE = Path(__file__).parents[2] / "docs/howto/several_machines.md"


def test_torchrun(both, day_ahead):
    """The command of the page on the quick task, by IPv6; the hosts' clocks are a day apart."""
    (block,) = re.findall(r"^```bash\n(torchrun[^`]*quickstart[^`]*)^```", PAGE.read_text(), re.M)
    where = {
        "NODE_0": both[0].address6,
        "--node-rank 0": "--node-rank {}",
        "runs/": "/tmp/",
    }
    for name, value in where.items():
        assert block.count(name) == 1
        block = block.replace(name, value)
    _, *arguments = shlex.split(block.replace("\\\n", " "))
    processes = [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run"),
            *(argument.replace("{}", str(number)) for argument in arguments),
            env=day_ahead if number else {},
        )
        for number, host in enumerate(both)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)[-8000:]
    assert "round 1/1" in said[0] and "round 1/1" not in said[1]
