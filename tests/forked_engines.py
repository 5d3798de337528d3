"""Engine processes that begin with all imports done: forks of a process that has done nothing else.

A new Python takes five seconds to import torch and this package. After `begin`, the engines'
processes of this process are forks of its copy, and run the same code from there on.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from importlib import import_module
from multiprocessing import Pipe, get_context, resource_tracker
from multiprocessing.reduction import recv_handle, send_handle

from lit_rlsched.engines import _engine_server, child
from lit_rlsched.processes import ChildProcess


def begin(split=False):
    """Fork the process that forks the engines; call this before the first thread begins.

    If the engine is vLLM with a `split` model, its workers are forks of the engine's process.
    """
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve(theirs, split)
    theirs.close()
    source = Source(ours, pid)
    child.ChildProcess = lambda *args: ForkedProcess(source, *args)


def serve(connection, split):
    """Fork engines and wait for them, until the trainer is gone."""
    for name in ("SIGTERM", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(message, int):
            connection.send(os.waitstatus_to_exitcode(os.waitpid(message, 0)[1]))
            continue
        descriptors = [recv_handle(connection) for _ in range(2)]
        if (pid := os.fork()) == 0:
            connection.close()
            if split:
                fork_workers(*descriptors)
            run(*message, *descriptors)
        os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(pid)


def fork_workers(*descriptors):
    """Let vLLM fork its workers, which then close descriptors whose other end waits for this."""
    # a tracker of its own, as in a new Python, unlinks its shared memory once it has ended
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    context = get_context("fork")

    def work(target, given):
        for descriptor in descriptors:
            os.close(descriptor)
        target(**given)

    class Workers(type(context)):
        def Process(self, *, target, kwargs, **more):
            return context.Process(target=work, args=(target, kwargs), **more)

    import_module("vllm.v1.executor.multiproc_executor").get_mp_context = Workers


def run(cores, environment, connection, lifeline):
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        _engine_server.main(cores, connection, lifeline, os.getppid())
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Source:
    """The trainer's side of `serve`."""

    def __init__(self, connection, pid):
        self.connection, self.pid = connection, pid
        self.lock = threading.Lock()  # engines start at the same time

    def ask(self, message, *descriptors):
        with self.lock:
            self.connection.send(message)
            for descriptor in descriptors:
                send_handle(self.connection, descriptor, self.pid)
            return self.connection.recv()


class ForkedProcess(ChildProcess):
    def __init__(self, source, arguments, environment):
        self.connection, theirs = Pipe()
        read, self._lifeline = os.pipe()
        descriptors = theirs.fileno(), read
        pid = source.ask((arguments[-1], dict(environment)), *descriptors)
        self.process = Process(source, pid)
        theirs.close()
        os.close(read)


class Process:
    """What `subprocess.Popen` has, for a process that is not a child of this one."""

    def __init__(self, source, pid):
        self.pid, self.returncode = pid, None
        self._source, self._descriptor = source, os.pidfd_open(pid)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("an engine", timeout)
            self.returncode = self._source.ask(self.pid)
            os.close(self._descriptor)
        return self.returncode
