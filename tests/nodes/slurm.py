"""A SLURM of our own over hosts: a controller on the first, and a node on each."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hosts import SHARED, Host

CONF = SHARED / "slurm.conf"
KEY = Path("/etc/munge/munge.key")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
CGROUPS = "freezer memory cpuset cpu cpuacct devices"
READY = 60.0


def _munge() -> None:
    """Start the daemon that tells who a message is from, unless it runs; hosts share its socket."""
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True).returncode == 0:
        return
    run = Path("/run/munge")
    if not KEY.exists():
        subprocess.run(["/usr/sbin/mungekey", "--create"], check=True)
    run.mkdir(exist_ok=True)
    for path in (KEY.parent, KEY, run):
        subprocess.run(["chown", "munge:munge", str(path)], check=True)
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True)


@contextmanager
def slurm(
    hosts: Sequence[Host], shared: Path, silence: int, cpus: int = 2
) -> Iterator[dict[str, str]]:
    """Start SLURM on hosts that share a folder; yields environment variables of its commands.

    A node is lost after `silence` seconds.
    """
    _munge()
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} NodeHostname={host.name} CPUs={cpus}"
        for host in hosts
    )
    names = ",".join(host.name for host in hosts)
    (shared / CONF.name).write_text(
        f"""ClusterName=ours
SlurmctldHost={hosts[0].name}({hosts[0].address})
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/tmp/slurm
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={SHARED}/slurmctld.log
SlurmdLogFile={SHARED}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={silence}
KillWait=5
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
    )
    (shared / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = {"SLURM_CONF": str(CONF)}
    mounts = "mount -t tmpfs none /sys/fs/cgroup; for c in " + CGROUPS + "; do "
    mounts += "mkdir -p /sys/fs/cgroup/$c; mount -t cgroup -o $c none /sys/fs/cgroup/$c; done"
    hosts[0].run("mkdir", "-p", "/tmp/slurm")
    hosts[0].start("slurmctld", "-D", "-c", "-i", env=env)  # -c: without jobs of an earlier one
    for host in hosts:
        host.run("sh", "-c", f"{mounts}; mkdir -p /tmp/slurmd")
        host.start("slurmd", "-D", "-N", host.name, env=env)
    deadline = time.monotonic() + READY
    while True:
        said = hosts[0].start("sinfo", "-h", "-N", "-o", "%T", env=env).communicate()[0].split()
        if said == ["idle"] * len(hosts):
            break
        logs = [path.read_text()[-1500:] for path in shared.glob("slurm*.log")]
        assert time.monotonic() < deadline, "\n".join([*said, *logs])
        time.sleep(0.5)
    try:
        yield env
    finally:
        for host in hosts:
            host.signal(signal.SIGKILL, "slurm")
