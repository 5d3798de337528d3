"""Engines in processes of their own that are killed or stopped where they are told.

A fault is `[engine, version, phase, turn, signal]`: the engine with this index strikes itself in
that turn of a phase of a round, which is drawn with that version of the policy. The phases are
`sync` (turn 0 is the loading of the weights, later turns belong to the check), `validation` and
`rollout`; `start` strikes each process that starts with that version.
"""

import os
import signal
from pathlib import Path

import psutil

from lit_rlsched.engines import ProcessEngine


def patience(engine):
    """Seconds to wait for an answer: on a busy machine what is not stopped may take long."""
    try:
        stopped = psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        stopped = False
    return 0.5 if stopped else 1e9


class Watched(ProcessEngine):
    """Knows whether its process hangs."""

    def limit(self, starts):
        return patience(self)


def struck(base, folder, faults, **settings):
    """An engine like `base` that strikes itself; each process leaves a file in the folder."""
    folder = str(folder)

    class Struck(base):
        def start(self, spec):
            super().start(spec)
            Path(folder, f"engine {spec.index} {os.getpid()}").touch()
            self.at = [spec.index, None, "", 0]

        def sync_weights(self, named_tensors, version):
            self.at[1:] = version, "start", 0
            self._strike()
            self.at[2] = "sync"
            self._strike()
            super().sync_weights(named_tensors, version)

        def submit(self, requests):
            if requests and (phase := phase_of(requests[0].id)) != self.at[2]:
                self.at[2:] = phase, 0
            super().submit(requests)

        def step(self):
            self.at[3] += 1
            self._strike()
            return super().step()

        def _strike(self):
            for number, (*at, how) in enumerate(faults):
                if at == self.at and (at[2] == "start" or first(folder, number)):
                    os.kill(os.getpid(), getattr(signal, how))

    return Watched(Struck(**settings))


def phase_of(request_id):
    if request_id.startswith("sync-probe/"):
        return "sync"
    return "validation" if request_id.startswith("val") else "rollout"


def first(folder, number):
    """Whether this is the first process that comes to a fault; it leaves a file."""
    try:
        os.close(os.open(f"{folder}/fault {number}", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def fallen(folder):
    """Numbers of the faults that fell."""
    return sorted(int(path.name.split()[1]) for path in Path(folder).glob("fault *"))


def left(folder):
    """Processes of engines that still run."""
    pids = [int(path.name.split()[2]) for path in Path(folder).glob("engine *")]
    return [pid for pid in pids if psutil.pid_exists(pid) and not _zombie(pid)]


def _zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
