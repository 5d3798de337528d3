"""`examples/cluster/ray_up.yaml`: from a third host, by real SSH."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import hosts as made
import pytest
from nodes.launching import need

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
FILE = made.REPO / "examples/cluster/ray_up.yaml"
HOME, USER = "/tmp/me", "me"
SSHD = """
HostKey /tmp/hostkey
UsePAM no
StrictModes no
PidFile /tmp/sshd.pid
"""
SETUP = f"""
set -e
echo '{USER}:x:0:0::{HOME}:/bin/bash' | cat - /etc/passwd > /tmp/passwd
mount --bind /tmp/passwd /etc/passwd
ln -s {made.REPO} {HOME}/lit-rlsched
touch {HOME}/.bashrc
mkdir -p /run/sshd
ssh-keygen -q -t ed25519 -N '' -f /tmp/hostkey
"""
SHORT = """
    data.engine.init_args.engine=TransformersEngine data.num_engines=1 data.prompts_per_round=2
    data.num_generations=2 data.max_completion_length=64 data.val_data=null trainer.max_epochs=1
    trainer.accelerator=cpu trainer.logger=false trainer.default_root_dir=/tmp/run
"""


def reachable(host, key):
    """Give a host a user with a home of its own, who may log in with a key."""
    folder = host.path(f"{HOME}/.ssh")
    folder.mkdir(parents=True, mode=0o700)
    shutil.copy(key, folder / "id_ed25519")
    shutil.copy(f"{key}.pub", folder / "authorized_keys")
    (folder / "config").write_text("StrictHostKeyChecking no\n")
    host.run("bash", "-c", SETUP)
    host.path("/tmp/sshd_config").write_text(SSHD)
    host.start("/usr/sbin/sshd", "-D", "-f", "/tmp/sshd_config")


def commands():
    """Return the commands of the file's head, for two nodes and a short run."""
    found = re.findall(r"^#   (.*)$", FILE.read_text(), re.MULTILINE)
    short = " ".join(f"--{option}" for option in SHORT.split())
    words = {
        "HEAD_NODE": "h1",
        "NODE_1 NODE_2": "h2",
        "YOUR_NAME": USER,
        str(FILE.relative_to(made.REPO)): "ray_up.yaml",
        "run.yaml": "configs/quickstart.yaml",
        'ray_cluster.yaml"': f'ray_cluster.yaml {short}"',
    }
    for old, new in words.items():
        found = [command.replace(old, new) for command in found]
    return found


@pytest.fixture
def by_ssh(three, tmp_path):
    """Hosts that reach each other by SSH."""
    need("openssh-server, openssh-client, rsync", "sshd", "ssh", "rsync")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    try:
        for host in three:
            reachable(host, key)
        yield three
    finally:
        for host in three:
            host.signal(signal.SIGKILL, "sshd")
            host.run("sh", "-c", f"umount /etc/passwd; rm -rf {HOME}")


def poll(done):
    """Wait until something is done."""
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_its_commands(by_ssh):
    *nodes, desk = by_ssh
    text = FILE.read_text().replace("HEAD_NODE", "h1").replace("NODE_1, NODE_2", "h2")
    desk.path(f"{HOME}/ray_up.yaml").write_text(text.replace("YOUR_NAME", USER))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(command):
        env = {"HOME": HOME, "USER": USER, "PATH": path}
        return desk.run("bash", "-c", f"cd; {command} 2>&1", env=env, timeout=200)

    token, up, fit, stop = commands()
    run(token)
    run(up)
    poll(lambda: any("raylet" in args for args in nodes[1].processes().values()))  # by the head
    assert "/tmp/run/checkpoints/round_00001-step_000001.ckpt" in run(fit)
    run(stop)
    poll(lambda: not [of for host in nodes for of in host.processes().values() if "ray" in of])
