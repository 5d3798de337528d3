"""Connects to a Ray cluster, or starts one on this node, and reserves resources there."""

import atexit
import logging
import math
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_rlsched._environment import passed
from lit_rlsched.engines.placement import available_cores

MIN_VERSION = (2, 59)
"""The first version whose local clusters ask for a token, so that other users cannot run code."""


class Reservation:
    """A placement group with equal bundles of resources, one for each engine.

    Args:
        engines: Number of engines.
        bundle: Resources of an engine, by Ray's names.
        timeout: Maximum seconds to wait for them.

    Raises:
        ImportError: Ray is missing or too old.
        RuntimeError: the cluster does not have the resources.
    """

    def __init__(self, engines: int, bundle: Mapping[str, float], timeout: float) -> None:
        self.bundle = dict(bundle)
        self._users, self._lock = engines, threading.Lock()
        self.local = connect(engines * self.bundle.get("CPU", 0))
        """Whether the cluster was started by this process, and has this node only."""
        from ray.util import placement_group

        self.group: Any = placement_group([self.bundle] * engines, strategy="SPREAD")
        if not self.group.wait(timeout):
            why = missing(self.bundle, engines)
            self._remove()
            raise RuntimeError(
                f"`RayEngine`: the Ray cluster has no room for {engines} x {_say(self.bundle)} "
                f"after {timeout:g} s: {why}. Start Ray on more nodes, or change `num_engines`, "
                "`tensor_parallel_size` or `RayEngine(resources=...)`."
            )

    def leave(self) -> None:
        """Note that an engine was closed; the last one gives the resources back."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _remove(self) -> None:
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self.group)


def connect(cpus: float) -> bool:
    """Connect this process to a cluster; return whether it is one that this process started.

    An existing cluster is that of `RAY_ADDRESS`, or one that `ray start` has started on this node.
    Otherwise one is started here, which ends with this process.

    Args:
        cpus: Minimum number of CPUs of a new cluster, as Ray counts them.

    Raises:
        ImportError: Ray is missing or too old.
        ConnectionError: the cluster of `RAY_ADDRESS` does not answer.
    """
    global _local
    ray = _import_ray()
    if ray.is_initialized():
        return _local
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray hides no GPU from an engine without one: it does not look for them, and Ray would warn
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    _local = (os.environ.get("RAY_ADDRESS") or _address_of_this_node() or "local") == "local"
    with _own_sigterm_handler():
        if not _local:
            ray.init(logging_level=logging.WARNING)  # it finds the address in the same places
            return False
        # Ray's own folder may belong to another user; the paths of sockets must be short
        folder = tempfile.mkdtemp(prefix="ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp"))
        atexit.register(_shut_down, folder)
        with _without_secrets():
            ray.init(
                "local",
                num_cpus=math.ceil(max(cpus, len(available_cores()))),
                include_dashboard=False,
                logging_level=logging.WARNING,
                _temp_dir=folder,
            )
    return True


_local = False


def _shut_down(folder: str) -> None:
    import ray

    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "`RayEngine` needs Ray: pip install 'lit-rlsched[ray]', on every node."
        ) from error
    if tuple(map(int, re.findall(r"\d+", ray.__version__)[:2])) < MIN_VERSION:
        raise ImportError(
            f"`RayEngine` needs Ray {'.'.join(map(str, MIN_VERSION))} or newer, and version "
            f"{ray.__version__} is installed: pip install -U 'lit-rlsched[ray]', on every node."
        )
    return ray


def _address_of_this_node() -> str | None:
    """Address of the cluster that `ray start` has started on this node, from the file it writes."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text().strip() or None
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
    return f"its {len(nodes)} nodes have {_say(held)} in all, which is enough for {room}"


def _say(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items())
