"""Real SLURM on hosts that share one folder: the scripts of `examples/cluster`."""

import re
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import hosts as made
import pytest
import torch
from nodes.launching import actors
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
    if missing := [name for name in PROGRAMS if not shutil.which(name, path="/usr/bin:/usr/sbin")]:
        pytest.skip(f"no {', '.join(missing)} here (Debian: slurm-wlm, munge)")
    number, silence = request.param
    hosts = three[:number]
    with slurm(hosts, shared, silence=silence) as env:
        yield hosts, shared, env


def submit(cluster, script, name, *arguments):
    """Submit a job with all nodes; returns its number."""
    hosts, _, env = cluster
    command = ("sbatch", f"--nodes={len(hosts)}", f"--output={made.SHARED}/{name}.out")
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


def weights(folder: Path):
    """Return the weights of a run's newest checkpoint."""
    newest = max(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    saved = torch.load(newest, weights_only=False)
    return saved["epoch"], torch.cat([p.flatten() for p in saved["state_dict"].values()])


def test_a_job_trains_on_both_nodes_and_goes_on_after_a_requeue(cluster):
    hosts, shared, env = cluster
    whole = submit(cluster, "slurm.sh", "whole", "--trainer.max_epochs=3")
    wait(cluster, whole, ("COMPLETED",))
    said = (shared / "whole.out").read_text()
    assert "round 3/3" in said
    stopped = submit(cluster, "slurm.sh", "stopped", "--trainer.max_epochs=3")
    out = shared / "stopped.out"
    while not out.exists() or "round 1/3" not in out.read_text():
        wait(cluster, stopped, ("PENDING", "RUNNING"))
        time.sleep(0.1)
    hosts[0].run("scancel", f"--signal={signal.SIGUSR1.name}", stopped, env=env)
    told = wait(cluster, stopped, ("PENDING", "COMPLETED"))
    if "JobState=PENDING" in told:  # SLURM lets a job that it has put back wait for two minutes
        hosts[0].run("scontrol", "update", f"JobId={stopped}", "StartTime=now", env=env)
    told = wait(cluster, stopped, ("COMPLETED",))
    assert "Restarts=1" in told, out.read_text()[-3000:]
    (epoch, ours), (wanted, theirs) = weights(shared / "stopped"), weights(shared / "whole")
    assert epoch == wanted and torch.equal(ours, theirs)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("cluster", [(3, 20)], indirect=True)
def test_engines_decode_on_the_other_nodes_and_one_of_these_is_lost(cluster):
    hosts, shared, _ = cluster
    more = ("-c", "configs/ray_cluster.yaml", "--data.engine.init_args.engine=TransformersEngine")
    more += ("--data.prompts_per_round=4", "--data.num_engines=2")
    job = submit(cluster, "slurm_ray.sh", "engines", *more, "--trainer.max_epochs=3")
    out = shared / "engines.out"
    while not out.exists() or "round 1/3" not in out.read_text():
        wait(cluster, job, ("PENDING", "RUNNING"))
        time.sleep(0.1)
    assert [len(actors(host)) for host in hosts] == [0, 1, 1]
    lost = hosts[2]
    lost.link(up=False)
    lost.signal(signal.SIGKILL, "ray")
    try:
        wait(cluster, job, ("COMPLETED",))
    finally:
        lost.link(up=True)
    said = out.read_text()
    assert f"on {lost.address}" in said and "round 3/3" in said, said
