"""Connects to a Ray cluster, or starts one on this node, and reserves resources there."""

import atexit
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lit_rlsched.engines.child import TICK
from lit_rlsched.engines.placement import available_cores
from lit_rlsched.engines.weight_transfer import in_thread
from lit_rlsched.processes import passed
from lit_rlsched.scheduling.time_limits import RunningClock
from lit_rlsched.settings import RunFailed, UsageError
from lit_rlsched.text import counted

MIN_VERSION = (2, 59)
"""The first version whose local clusters ask for a token, so that other users cannot run code."""
HEAD_SILENCE = 20.0
"""Seconds without an answer of the cluster's head after which the run stops."""
LOCK = "trainer.lock"
"""File in the folder of a local cluster, locked by the trainer as long as it lives."""


class Reservation:
    """A placement group with equal bundles of resources, one for each engine."""

    def __init__(self, engines: int, bundle: Mapping[str, float], timeout: float) -> None:
        self.bundle = dict(bundle)
        self._users, self._lock = engines, threading.Lock()
        self.local = connect(engines * self.bundle.get("CPU", 0), timeout)
        """Whether the cluster was started by this process, and has this node only."""
        from ray.util import placement_group

        self.group: Any = placement_group([self.bundle] * engines, strategy="SPREAD")
        self.head = HeadWatch()
        if not self.group.wait(timeout):
            why = missing(self.bundle, engines)
            self._remove()
            raise RunFailed(
                f"`RayEngine`: the Ray cluster has no room for {engines} x {_say(self.bundle)} "
                f"after {timeout:g} s: {why}. Start Ray on more nodes, or change `num_engines`, "
                "`tensor_parallel_size` or `RayEngine(resources=...)`."
            )

    def node(self, index: int) -> str:
        """Return id and address of the node of an engine, for messages."""
        import ray
        from ray.util import placement_group_table

        found = placement_group_table(self.group)["bundles_to_node_id"].get(index, "")
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return f"node {found[:8]} ({addresses.get(found, 'lost')}) of the Ray cluster"

    def leave(self) -> None:
        """Note that an engine was closed; the last one gives the resources back."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _remove(self) -> None:
        import ray
        from ray.exceptions import GetTimeoutError
        from ray.util import remove_placement_group

        self.head.end()
        if ray.is_initialized() and not self.head.lost:
            with suppress(GetTimeoutError):  # the resources are free when this process ends
                remove_placement_group(self.group)


class HeadWatch:
    """Stops the run as SIGTERM does, saved, when the head of the cluster has been silent for long.

    Without this, Ray ends the process 60 seconds after it has lost the head, whatever it is doing.
    """

    def __init__(self) -> None:
        import ray

        self.lost = False
        """Whether the head has not answered for `HEAD_SILENCE` seconds."""
        address = ray.get_runtime_context().gcs_address
        self._sentence = (
            f"the head of the Ray cluster at {address} has not answered for {HEAD_SILENCE:g} s."
        )
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="ray-head").start()

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    def check(self) -> None:
        """Wait until the head answers; Ray would wait for it where no signal ends the wait."""
        if self.lost or not self._answers():
            self.lost = True
            self.end()
            raise RunFailed(
                f"`RayEngine`: {self._sentence} Start the cluster again, and resume the run."
            )

    def _run(self) -> None:
        while self._answers():
            if self._ended.wait(TICK):
                return
        if not self._ended.is_set():
            self.lost = True
            print(f"error: {self._sentence} The run stops.", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def _answers(self) -> bool:
        """Wait for an answer of the head, at most while this process runs for `HEAD_SILENCE`."""
        import ray

        asked, silent, last = in_thread(ray.nodes), RunningClock(TICK), time.monotonic()
        while not wait([asked], TICK).done:
            now = time.monotonic()
            if silent.advance(now - last) > HEAD_SILENCE:
                return False
            last = now
        return True


def connect(cpus: float, timeout: float) -> bool:
    """Connect this process to a cluster; return whether it is one that this process started.

    An existing cluster is that of `RAY_ADDRESS`, or one that this user has started on this node
    with `ray start`. Otherwise this process starts one, which ends with it.
    """
    global _own
    ray = _import_ray()
    if ray.is_initialized():
        return _own is not None
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray hides no GPU from an engine without one: it does not look for them, and Ray would warn
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    named = os.environ.get("RAY_ADDRESS")
    address = named or _address_of_this_node() or "local"
    with _own_sigterm_handler():
        if address != "local":
            said = f"`RAY_ADDRESS={named}`" if named else f"`{_address_file()}` says {address}"
            _wait_for(address, said, timeout if named else 0.0)
            try:
                ray.init(logging_level=logging.WARNING)  # it finds the address in the same places
            except Exception as error:
                raise UsageError(
                    f"`RayEngine`: the Ray cluster at {address} does not accept the trainer: "
                    f"{_reason(error)}. Run the trainer on a node of the cluster, with the "
                    "cluster's versions of Ray and Python and, if it asks for a token, with "
                    "`RAY_AUTH_MODE=token` and that token."
                ) from error
            return False
        _own = _new_folder()
        atexit.register(disconnect)
        with _without_secrets():
            ray.init(
                "local",
                num_cpus=math.ceil(max(cpus, len(available_cores()))),
                include_dashboard=False,
                logging_level=logging.WARNING,
                _temp_dir=_own[0],
                _system_config={"prestart_worker_first_driver": False},  # one for each core
            )
    return True


_own: tuple[str, FileLock] | None = None
"""Folder and lock of the cluster that this process has started."""


def disconnect() -> None:
    """End the cluster that this process has started, and remove its folder."""
    global _own
    import ray

    ray.shutdown()
    if _own is not None:
        folder, lock = _own
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
        _own = None


def _wait_for(address: str, said: str, timeout: float) -> None:
    """Wait until a cluster answers; Ray itself would wait for minutes."""
    if address == "auto":  # Ray looks for a cluster on this node
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "/" in host:
        raise UsageError(
            f"{said}: expected `HOST:PORT`, the address that `ray start --head` prints, or `local`."
        )
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(1.0)
                continue
            waited = f" after {timeout:g} s" if timeout else ""
            raise UsageError(
                f"{said}, and no Ray cluster answers there{waited} ({error}). Start it with `ray "
                "start --head`, or set `RAY_ADDRESS=local`: then the run starts one of its own."
            ) from error


def _reason(error: Exception) -> str:
    """Return why Ray could not connect, which it may say at the end of a traceback."""
    text = str(error.__cause__ or error)
    *_, last = re.split(r"^[\w.]+Error: ", text, flags=re.MULTILINE)
    return " ".join(last.split()).rstrip(".")


def _new_folder() -> tuple[str, FileLock]:
    """Make a folder for the files of a cluster; remove those of trainers that were killed.

    Ray's own folder may belong to another user. The paths of sockets must be short.
    """
    parent = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    for old in parent.glob(f"ray-*/{LOCK}"):
        # a folder without a session may belong to a trainer that does not hold its lock yet
        if old.parent.lstat().st_uid == os.getuid() and any(old.parent.glob("session_*")):
            with suppress(Timeout, OSError), FileLock(old, timeout=0):
                shutil.rmtree(old.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix="ray-", dir=parent)
    lock = FileLock(Path(folder, LOCK))
    lock.acquire()
    return folder, lock


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "`RayEngine` needs Ray: pip install 'lit-rlsched[ray]', on every node."
        ) from error
    if tuple(map(int, re.findall(r"\d+", ray.__version__)[:2])) < MIN_VERSION:
        raise UsageError(
            f"`RayEngine` needs Ray {'.'.join(map(str, MIN_VERSION))} or newer, and version "
            f"{ray.__version__} is installed: pip install -U 'lit-rlsched[ray]', on every node."
        )
    return ray


def _address_file() -> Path:
    """File to which `ray start` writes the address of the cluster."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder, "ray", "ray_current_cluster")


def _address_of_this_node() -> str | None:
    """Address of the cluster that this user has started on this node with `ray start`.

    Ray's folder may be anybody's, and the actors of a cluster could run code in the trainer.
    """
    file = _address_file()
    try:
        return (file.stat().st_uid == os.getuid() and file.read_text().strip()) or None
    except OSError:
        return None


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces by one that exits without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _without_secrets() -> Iterator[None]:
    """Keep the trainer's secrets out of the environment of the processes that Ray starts.

    Reward functions could read it. The engines get their variables in a call.
    """
    hidden = {
        name: value
        for name, value in os.environ.items()
        if not passed(name, value) and not name.startswith("RAY_")
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def missing(bundle: Mapping[str, float], engines: int) -> str:
    """Return why the connected cluster has no room for so many engines."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(
        min(int(node.get(name, 0) / amount + 1e-6) for name, amount in bundle.items())
        for node in nodes
    )
    if room >= engines:
        free = ray.available_resources()
        return f"others use it ({_say({name: free.get(name, 0) for name in bundle})} are free)"
    held = {name: sum(node.get(name, 0) for node in nodes) for name in bundle}
    where = counted(len(nodes), "node")
    return f"it has {where} with {_say(held)} in all, which is enough for {room}"


def _say(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items())
