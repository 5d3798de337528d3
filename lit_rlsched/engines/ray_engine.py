"""Runs any engine in a Ray actor, on this node or another one of a cluster."""

import logging
import os
import pickle
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lit_rlsched import __version__
from lit_rlsched.engines import _ray_actor
from lit_rlsched.engines.base import RolloutEngine
from lit_rlsched.engines.child import LAUNCHER, Child
from lit_rlsched.engines.process_engine import ProcessEngine
from lit_rlsched.engines.spec import EngineSpec, Footprint, Sizes
from lit_rlsched.engines.weights import ObjectStore
from lit_rlsched.processes import require_posix
from lit_rlsched.settings import RunFailed, UsageError

MIN_VERSION = (2, 59)
"""The first version that asks for a token by default, so that other users cannot run code."""
LOST_NODE = 60.0
"""Seconds for which Ray may take a lost node for alive and place new actors there."""
STARTUP = 300.0
"""Seconds for an actor to start, which imports the package and torch."""
THREADS = 3
"""Of the actor, beside the engine's: one returns answers, one takes messages, one waits."""


class RayEngine(ProcessEngine):
    """Runs another engine in a Ray actor, on this node or another one of a cluster.

    With `num_engines` above 1, each engine is an actor. It differs from `ProcessEngine` only in
    where the engine runs and how weights get there: through Ray's object store, which copies them
    once to each node. It draws the same tokens. The trainer, not Ray, replaces actors that die or
    hang, in the same way, and counts restarts alike.

    The cluster is yours: the one that the script has connected to with `ray.init()`, else that of
    the environment variable `RAY_ADDRESS`, else the one that this user has started on this node
    with `ray start`. A placement group reserves the resources of all engines, spread over the
    nodes: on GPUs, `tensor_parallel_size` of them per engine. If the head of the cluster is lost,
    Ray ends the run after a minute.

    Args:
        engine: The engine to run; `VLLMEngine()` by default.
        resources: Resources of each engine besides its GPUs, by Ray's names; `{"CPU": 1}` by
            default. On a CPU, an engine computes with as many threads as it has CPUs, unless
            `OMP_NUM_THREADS` is set.
        timeout: Maximum seconds to wait until the cluster has the resources.
        weight_transfer: Way of the weights from GPU to GPU in place of Ray's object store; see
            `ProcessEngine`. The cluster must leave the trainer's GPU out.

    Raises:
        UsageError: in `start`: Ray is missing or too old; there is no cluster, or it does not
            accept the trainer.
        RunFailed: in `start`: the cluster does not have the resources, a node has another
            version of this package, or an actor does not start within 5 minutes; later as
            `ProcessEngine`.

    Example::

        RolloutDataModule(..., engine=RayEngine(VLLMEngine()), num_engines=16)
    """

    gpus_advice = (
        "Start Ray without the trainer's GPUs (`CUDA_VISIBLE_DEVICES=1,2,3 ray start --head` "
        "if the trainer has GPU 0)"
    )
    _kind_of_store = ObjectStore

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        resources: dict[str, float] | None = None,
        timeout: float = 50.0,
        weight_transfer: Literal["nccl"] | None = None,
    ) -> None:
        super().__init__(engine, weight_transfer)
        self.resources = {"CPU": 1.0} if resources is None else dict(resources)
        self.timeout = timeout
        if "GPU" in self.resources:
            raise UsageError(
                f"`RayEngine(resources={resources})`: leave `GPU` out, it is the engine's "
                "`tensor_parallel_size`."
            )
        self._reservation: Reservation | None = None

    def footprint(self, spec: EngineSpec, sizes: Sizes) -> Footprint:
        """As if the cluster had no GPU of the trainer's; on CPU, with all engines on one node."""
        return replace(super().footprint(spec, sizes), apart=spec.device.type == "cuda")

    def bundle(self, spec: EngineSpec) -> dict[str, float]:
        """Return the resources of one engine, by Ray's names."""
        gpus = {"GPU": float(self.tensor_parallel_size)} if spec.device.type == "cuda" else {}
        return {**self.resources, **gpus}

    def reserve(self, spec: EngineSpec, engines: Sequence[RolloutEngine]) -> None:
        """Reserve a bundle of resources for each of the engines.

        Raises:
            UsageError: Ray is missing or too old, or there is no cluster that accepts this process.
            RunFailed: the cluster does not have the resources.
        """
        require_posix("`RayEngine`")
        for engine in engines:
            engine.close()
        self._share_transfer(spec, engines)
        reservation = Reservation(len(engines), self.bundle(spec), self.timeout)
        import ray  # it is there, and connected

        for engine in engines:
            assert isinstance(engine, RayEngine)
            engine._reservation = reservation
            engine.trainer_address = str(ray.util.get_node_ip_address())

    def start(self, spec: EngineSpec) -> None:
        if spec.engines == 1:
            self.reserve(spec, [self])
        if spec.device.type == "cuda":  # Ray shows an actor only its own
            spec = replace(spec, device=torch.device("cuda", 0))
        super().start(spec)

    def _launch(self) -> None:
        super()._launch()
        assert isinstance(self.child, ActorChild)
        if not (self.engine.virtual_clock or self.child.is_here):  # it has another clock
            offset = time.monotonic() - self.child.call("engine", "now")
            self.child.call("engine", "__setattr__", "clock_offset", offset)

    @property
    def numbered_name(self) -> str:
        """Name of the engine in messages, with its address if it runs on another node."""
        place = self._child.place if isinstance(self._child, ActorChild) else ""
        return super().numbered_name + place

    def _connect(self, spec: EngineSpec) -> "ActorChild":
        assert self._reservation is not None
        return ActorChild(self.limit, self._reservation, spec)

    def close(self) -> None:
        super().close()
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.leave()


class Reservation:
    """A placement group with equal bundles of resources, one for each engine."""

    def __init__(self, engines: int, bundle: Mapping[str, float], timeout: float) -> None:
        self.bundle = dict(bundle)
        self._users, self._lock = engines, threading.Lock()
        connect()
        from ray.util import placement_group

        self.group: Any = placement_group([self.bundle] * engines, strategy="SPREAD")
        if not self.group.wait(timeout):
            self._remove()
            wanted = " + ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
            raise RunFailed(
                f"`RayEngine`: the Ray cluster has no room for {engines} x {wanted} after "
                f"{timeout:g} s (`ray status` shows what it has and who uses it). Start Ray on "
                "more nodes, or change `num_engines`, `tensor_parallel_size` or "
                "`RayEngine(resources=...)`."
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

        if ray.is_initialized():
            with suppress(GetTimeoutError):  # the resources are free when this process ends
                remove_placement_group(self.group)


def connect() -> None:
    """Connect this process to the user's cluster, unless it is connected."""
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
    if ray.is_initialized():
        return
    # Ray hides no GPU from an engine without one: it does not look for them, and Ray would warn
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS") or _address_of_this_node()
    if address is None:
        raise UsageError(
            "`RayEngine`: this user has started no Ray cluster on this node. Start one (`ray start "
            "--head`), or name one with `RAY_ADDRESS=HOST:PORT`."
        )
    if address != "auto" and not re.fullmatch(r"[^/]+:\d+", address):
        raise UsageError(
            f"`RAY_ADDRESS={address}`: expected `HOST:PORT`, the address that `ray start --head` "
            "prints, or `auto`."
        )
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, logging_level=logging.WARNING)
    except Exception as error:
        text = str(error.__cause__ or error)  # it may be at the end of a traceback
        reason = " ".join(re.split(r"^[\w.]+Error: ", text, flags=re.MULTILINE)[-1].split())
        raise UsageError(
            f"`RayEngine`: no Ray cluster at {address} accepts the trainer: {reason.rstrip('.')}. "
            "Run the trainer on a node of the cluster, with the cluster's versions of Ray and "
            "Python and, if it asks for a token, with `RAY_AUTH_MODE=token` and that token."
        ) from error
    finally:
        if in_main:  # Ray's handler would exit without a checkpoint
            signal.signal(signal.SIGTERM, handler)


def _address_of_this_node() -> str | None:
    """Address that `ray start` of this user has left here; actors could run code in the trainer."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(folder, "ray", "ray_current_cluster")
    try:
        return (file.stat().st_uid == os.getuid() and file.read_text().strip()) or None
    except OSError:
        return None


class ActorChild(Child):
    """An engine in a Ray actor."""

    def __init__(
        self, limit: Callable[[bool], float], reservation: Reservation, spec: EngineSpec
    ) -> None:
        super().__init__(limit, spec.name)
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._killed = False
        self._node = self._address = ""
        self._placed_on = partial(reservation.node, spec.index)
        self._sent = 0
        self._batch: Any = None
        """Reference of the next answers."""
        self._answers: deque[bytes | None] = deque()
        self._how = "died"
        """How the actor ended."""
        self._here = ray.get_runtime_context().get_node_id()
        more = dict(reservation.bundle)
        strategy = PlacementGroupSchedulingStrategy(
            reservation.group, placement_group_bundle_index=spec.index
        )
        ray.cloudpickle.register_pickle_by_value(_ray_actor)
        actor_class = ray.remote(
            num_cpus=more.pop("CPU", 0),
            num_gpus=more.pop("GPU", 0),
            resources=more,
            scheduling_strategy=strategy,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=THREADS,
        )(_ray_actor.EngineActor)
        self._create = partial(actor_class.remote, __version__, LAUNCHER)
        self._actor = self._create()
        self._hello = self._actor.hello.remote()

    @property
    def is_here(self) -> bool:
        """Whether the actor, which runs, is on the trainer's node."""
        return self._node == self._here

    @property
    def place(self) -> str:
        """Where the actor runs, for messages; empty on the trainer's node."""
        return "" if self.is_here or not self._address else f" on {self._address}"

    def post(self, message: tuple[Any, ...]) -> None:
        if message[1] == "close" and self._hello is not None:
            raise ConnectionError("the actor has not started")  # which may take minutes
        self._greet()
        self._actor.tell.remote(self._sent, message)
        self._sent += 1

    def take(self) -> Any:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError

        try:
            while not self._answers:
                if self._batch is None:
                    self._batch = self._actor.answers.remote()
                self._answers.extend(ray.get(self._batch))
                self._batch = self._actor.answers.remote()  # they come while these are read
        except (RayActorError, ObjectLostError) as error:
            raise EOFError from error
        answer = self._answers.popleft()
        if answer is None:
            raise EOFError
        return pickle.loads(answer)

    def _greet(self) -> None:
        """Wait until the actor runs, and refuse another version of the package.

        Where it was on a node that is lost, it is created again.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        began = time.monotonic()
        while self._hello is not None:
            try:
                hello = ray.get(self._hello, timeout=STARTUP)
                version, self._node, self._address, self.pid = hello
                self._hello = None
            except GetTimeoutError:
                self.kill()
                raise RunFailed(
                    f"`RayEngine`: an actor on {self._placed_on()} does not start within "
                    f"{STARTUP:g} s. Ray's logs on that node (`/tmp/ray/session_latest/logs`) say "
                    "why."
                ) from None
            except RayActorError as error:
                time.sleep(1.0)
                if error.actor_init_failed:
                    self._how = f"could not be created ({str(error).splitlines()[-1]})"
                late = time.monotonic() - began > LOST_NODE
                if late or error.actor_init_failed or self._killed:
                    raise ConnectionError from error
                self._actor = self._create()
                self._hello = self._actor.hello.remote()
            else:
                if version != __version__:
                    self.kill()
                    raise RunFailed(
                        f"`RayEngine`: {self._placed_on()} has "
                        f"{f'lit-rlsched {version}' if version else 'no lit-rlsched'}, and the "
                        f"trainer {__version__}. Install the same version on every node."
                    )

    def wait(self, seconds: float) -> None:
        import ray

        with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            ray.get(self._actor.wait.remote(), timeout=seconds)

    def strike(self) -> None:
        import ray

        self._killed = True
        if ray.is_initialized():
            ray.kill(self._actor)
        if self.pid is not None and self.is_here:  # Ray asks a stopped process in vain
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        self.strike()
        self._batch = None
        return self._how
