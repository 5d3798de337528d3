"""Real SLURM on hosts that share one folder: the scripts of `examples/cluster`."""

import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import hosts as made
import pytest
import torch
from nodes.launching import actors, need
from nodes.slurm import PROGRAMS, slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.timeout(1300),  # on a busy machine; `wait` ends sooner, and says what it waits for
]

RUN = (
    *("-c", "configs/quickstart.yaml", "--data.engine=TransformersEngine"),
    *("--data.prompts_per_round=4", "--data.num_generations=4", "--data.micro_batch_tokens=1024"),
    *("--trainer.accelerator=cpu", "--trainer.limit_val_batches=0", "--trainer.logger=false"),
    "--trainer.precision=64-true",
)


@pytest.fixture(params=[(2, 300)])
def cluster(three, shared, request):
    """Hosts, their shared folder as seen from here, and variables of SLURM's commands."""
    need("slurm-wlm, munge", *PROGRAMS)
    number, silence = request.param
    hosts = three[:number]
    with slurm(hosts, shared, silence=silence) as env:
        yield hosts, shared, env


def submit(cluster, script, name, *arguments, nodes=2):
    """Submit a job; returns its number."""
    hosts, _, env = cluster
    command = ("sbatch", f"--nodes={nodes}", f"--output={made.SHARED}/{name}.out")
    run = (*RUN, f"--trainer.default_root_dir={made.SHARED}/{name}", *arguments)
    said = hosts[0].run(*command, f"examples/cluster/{script}", *run, env=env)
    return re.search(r"job (\d+)", said)[1]


def wait(cluster, job, until, seconds=400):
    """Wait until a job has one of these states."""
    hosts, shared, env = cluster
    deadline = time.monotonic() + seconds
    while True:
        said = hosts[0].run("scontrol", "show", "job", job, env=env)
        state = re.search(r"JobState=(\w+)", said)[1]
        if state in until:
            return said
        logs = "\n".join(path.read_text()[-3000:] for path in shared.glob("*.[ol]*"))
        assert time.monotonic() < deadline and state not in ("FAILED", "TIMEOUT"), said + logs
        time.sleep(0.5)


def wait_for_round(cluster, job, name):
    """Wait until a job has ended its first round."""
    out = cluster[1] / f"{name}.out"
    while not out.exists() or "round 1/3" not in out.read_text():
        wait(cluster, job, ("PENDING", "RUNNING"))
        time.sleep(0.1)


def starts_again(cluster, job, name):
    """Check that a job is put back into the queue once, and ends as it should."""
    hosts, shared, env = cluster
    told = wait(cluster, job, ("PENDING", "COMPLETED"))
    if "JobState=PENDING" in told:  # SLURM lets a job that it has put back wait for two minutes
        hosts[0].run("scontrol", "update", f"JobId={job}", "StartTime=now", env=env)
    told = wait(cluster, job, ("COMPLETED",))
    said = (shared / f"{name}.out").read_text()
    assert "Restarts=1" in told and "round 3/3" in said, said[-3000:]


def learns_the_same(cluster, name):
    """Check that a job has the weights of one that loses nothing."""
    shared = cluster[1]
    (epoch, ours), (wanted, theirs) = weights(shared / name), weights(shared / "whole")
    assert epoch == wanted and torch.equal(ours, theirs)


def weights(folder: Path):
    """Return the weights of a run's newest checkpoint."""
    newest = max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    saved = torch.load(newest, weights_only=False)
    return saved["epoch"], torch.cat([p.flatten() for p in saved["state_dict"].values()])


def whole(cluster):
    """Run a job that loses nothing, unless one has run."""
    if (cluster[1] / "whole").exists():
        return
    job = submit(cluster, "slurm.sh", "whole", "--trainer.max_epochs=3")
    wait(cluster, job, ("COMPLETED",))
    assert "round 3/3" in (cluster[1] / "whole.out").read_text()


def test_a_job_trains_on_both_nodes_and_goes_on_after_a_requeue(cluster):
    whole(cluster)
    job = submit(cluster, "slurm.sh", "stopped", "--trainer.max_epochs=3")
    wait_for_round(cluster, job, "stopped")
    cluster[0][0].run("scancel", f"--signal={signal.SIGUSR1.name}", job, env=cluster[2])
    starts_again(cluster, job, "stopped")
    learns_the_same(cluster, "stopped")


@pytest.mark.skipif(os.environ.get("FAILURES") != "all", reason="one of `make failures`")
@pytest.mark.parametrize("cluster", [(3, 20)], indirect=True)
def test_a_node_of_ranks_is_lost(cluster, record_property):
    """SLURM starts the job again with another node."""
    whole(cluster)
    job = submit(cluster, "slurm.sh", "lost", "--trainer.max_epochs=3")
    wait_for_round(cluster, job, "lost")
    lost, began = cluster[0][1], time.monotonic()
    lost.link(up=False)
    try:
        wait(cluster, job, ("PENDING",))
        seconds = time.monotonic() - began
        record_property("lost", ("SLURM", "ddp", "a node cut off", "any", "starts again", seconds))
        starts_again(cluster, job, "lost")
    finally:
        lost.link(up=True)
        lost.signal(signal.SIGKILL, "lit-rlsched")
    learns_the_same(cluster, "lost")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("cluster", [(3, 20)], indirect=True)
def test_a_node_of_engines_is_lost(cluster, record_property):
    """SLURM starts the job again when the node is back."""
    hosts = cluster[0]
    more = ("-c", "configs/ray_cluster.yaml", "--data.engine.init_args.engine=TransformersEngine")
    more += ("--data.prompts_per_round=4", "--data.num_engines=2", "--trainer.max_epochs=3")
    job = submit(cluster, "slurm_ray.sh", "engines", *more, nodes=3)
    wait_for_round(cluster, job, "engines")
    assert [len(actors(host)) for host in hosts] == [0, 1, 1]
    lost, began = hosts[2], time.monotonic()
    lost.link(up=False)
    try:
        wait(cluster, job, ("PENDING",))
    finally:
        lost.link(up=True)
    seconds = time.monotonic() - began
    record_property("lost", ("SLURM, Ray", "one rank", "a node", "any", "starts again", seconds))
    while any("slurmstepd" in args for args in lost.processes().values()):
        time.sleep(0.2)  # a job that starts sooner loses the node when its old step ends there
    starts_again(cluster, job, "engines")
