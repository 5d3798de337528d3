"""The processes of a run: one draws the rollouts, and all of them run the policy together."""

import os
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, TypeVar

import torch.distributed as dist

from lit_rlsched.settings import RunFailed

T = TypeVar("T")
R = TypeVar("R")


class Team:
    """The only process of a run; `DistributedTeam` stands for several.

    Rank 0 leads: it alone has the engine, the reward workers and the pool. A function that runs the
    policy is a *task*: every rank runs it together with the leader, because a rank may hold only a
    part of the weights.
    """

    rank = 0
    size = 1
    leading = False
    """Whether this process is inside of `lead` and can call tasks of others."""

    @property
    def leads(self) -> bool:
        """Whether this process draws the rollouts."""
        return self.rank == 0

    def lead(self, draw: Callable[[], T], tasks: Mapping[str, Callable[..., Any]]) -> T:
        """Run `draw` on the leader, while the others run the tasks that it calls."""
        return draw()

    def call(self, name: str, task: Callable[..., T], *args: Any) -> T:
        """Run a task on every rank, and return the leader's result; only inside of `lead`."""
        return task(*args)

    def iterate(self, name: str, task: Callable[..., Iterator[T]], *args: Any) -> Iterator[T]:
        """Iterate over a task on every rank, and yield the leader's values; inside of `lead`."""
        return task(*args)

    def share(self, name: str, task: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        """Divide items among the ranks; give the task's results in order; inside of `lead`."""
        return map(task, items)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the leader's value on every rank."""
        return value

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""

    def close(self) -> None:
        """Leave the team."""


BEAT = 2.0
"""Seconds between two signs of life."""
SILENCE = 120.0
"""Seconds without a sign of life after which a rank counts as stopped."""
GRACE = 3.0
"""Seconds for the main thread to end the run after another rank has failed."""

_ALIVE, _DONE = "alive", "done"


class TeamWatch:
    """Connections between the leader and the other ranks for signs of life and last words.

    If a rank fails, dies or stops, every other rank prints a sentence that names it. If a main
    thread has not raised an error of its own after `GRACE` seconds, it waits for that rank in a
    collective, and its process ends with exit code 1.
    """

    def __init__(self, rank: int, all_gather: Callable[[Any], list[Any]]) -> None:
        self._cause: str | None = None
        self._failed = threading.Event()
        self._rank = rank
        self._ending = threading.Event()
        self._sending = threading.Lock()
        self._connections: dict[int, Connection] = {}
        own = socket.gethostname()
        host, key = os.environ.get("MASTER_ADDR", "127.0.0.1"), secrets.token_bytes(32)
        if rank == 0:
            # all interfaces, by IPv4 and IPv6: a host's own name may be 127.0.1.1 to itself
            every = host not in ("127.0.0.1", "::1", "localhost")
            both = every and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both or host == "::1" else socket.AF_INET
            with socket.create_server(
                ("" if every else host, 0), family=family, backlog=1024, dualstack_ipv6=both
            ) as server:
                server.settimeout(0.1)
                ranks = all_gather((os.getpid(), own, server.getsockname()[1], key))
                while len(self._connections) < len(ranks) - 1:
                    with suppress(OSError):  # nobody has come, or has gone again
                        made, _ = server.accept()
                        # whoever is no rank of this run keeps nobody waiting
                        threading.Thread(target=self._greet, args=(made, key), daemon=True).start()
        else:
            ranks = all_gather((os.getpid(), own, None, None))
            *_, port, key = ranks[0]
            # `multiprocessing.connection.Client` knows IPv4 alone
            made = socket.create_connection((host, port), timeout=10)
            made.settimeout(None)
            self._connections[0] = Connection(made.detach())
            answer_challenge(self._connections[0], key)
            deliver_challenge(self._connections[0], key)
            self._connections[0].send(rank)
        apart = len({name for _, name, *_ in ranks}) > 1
        self._names = [
            f"Rank {i} (process {pid}{f' on {name}' if apart else ''})"
            for i, (pid, name, *_) in enumerate(ranks)
        ]
        threading.Thread(target=self._beat, daemon=True, name="team-beat").start()
        for other in self._connections:
            threading.Thread(
                target=self._listen, args=(other,), daemon=True, name=f"team-watch-{other}"
            ).start()

    def _greet(self, made: socket.socket, key: bytes) -> None:
        """Keep a connection if its other side knows the key, and tells which rank it is."""
        connection = Connection(made.detach())
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            self._connections[connection.recv()] = connection
        except (AuthenticationError, EOFError, OSError):
            connection.close()

    def cause(self, seconds: float) -> str | None:
        """Wait at most so long, and return which other rank has failed first, and how."""
        self._failed.wait(seconds)
        return self._cause

    def tell(self, message: str) -> None:
        """Tell the other ranks why this one ends."""
        self._ending.set()
        self._send(f"{self._names[self._rank]} has failed: {message}")

    def close(self) -> None:
        """Tell the other ranks that this one ends as it should."""
        if not self._ending.is_set():
            self._ending.set()
            self._send(_DONE)

    def _send(self, message: str) -> None:
        with self._sending:
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.send(message)

    def _beat(self) -> None:
        while not self._ending.wait(BEAT):
            self._send(_ALIVE)

    def _listen(self, other: int) -> None:
        """Wait until another rank ends, and end this one if that is an error."""
        name = self._names[other]
        message = _ALIVE
        while message == _ALIVE:
            try:
                silent = not self._connections[other].poll(SILENCE)
                message = (
                    f"{name} shows no sign of life" if silent else self._connections[other].recv()
                )
            except (OSError, EOFError):
                message = f"{name} has died"
        if message == _DONE or self._cause is not None:
            return
        self._cause = message
        self._failed.set()
        if self._ending.is_set():
            return
        print(f"error: {message}. The run ends.", file=sys.stderr, flush=True)
        if self._rank == 0:
            self._send(message)
        if not self._ending.wait(GRACE):
            os._exit(1)


_END, _FAIL, _CALL, _SHARE = "end", "fail", "call", "share"


class RankFailed(RunFailed):
    """Another rank has failed, so this one ends too."""


class DistributedTeam(Team):
    """The ranks of a Trainer, after the process group of its strategy was made.

    Messages have a group of their own on the CPU. It has no time limit, because the others wait in
    it for a whole rollout, while a wait in the strategy's group is an error after its time limit.
    `TeamWatch` ends the wait if a rank dies or stops.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._watch = TeamWatch(self.rank, self.all_gather)

    def lead(self, draw: Callable[[], T], tasks: Mapping[str, Callable[..., Any]]) -> T:
        if not self.leads:
            return self._follow(tasks)
        self.leading = True
        try:
            result = draw()
        except BaseException as error:
            from lightning.pytorch.utilities.exceptions import SIGTERMException

            said = f"Rank 0, which draws, has failed: {type(error).__name__}: {error}"
            stops = isinstance(error, SIGTERMException)
            self.broadcast((_FAIL, SIGTERMException(*error.args) if stops else RankFailed(said)))
            raise
        finally:
            self.leading = False
        self.broadcast((_END, result))
        return result

    def call(self, name: str, task: Callable[..., T], *args: Any) -> T:
        self._ask(_CALL, name, args)
        return task(*args)

    def iterate(self, name: str, task: Callable[..., Iterator[T]], *args: Any) -> Iterator[T]:
        self._ask(_CALL, name, args)
        values = task(*args)
        try:
            for value in values:  # noqa: UP028  # `yield from` would close it with this one
                yield value
        finally:
            deque(values, maxlen=0)  # the other ranks go through all of it

    def share(self, name: str, task: Callable[[T], R], items: Iterable[T]) -> list[R]:
        if not (items := list(items)):
            return []
        self._ask(_SHARE, name, items)
        return self._share(task, items)

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def failed(self, error: BaseException) -> None:
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        if isinstance(error, SIGTERMException | KeyboardInterrupt):
            return  # every rank stops
        # A lost connection is an error before the other side of it is known to have ended.
        if (cause := self._watch.cause(seconds=1.0)) is not None:
            error.add_note(cause)
        self._watch.tell(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self._watch.close()

    def _ask(self, kind: str, name: str, args: Sequence[Any]) -> None:
        if not self.leading:
            raise RuntimeError(f"The task `{name}` was called outside of `Team.lead`.")
        self.broadcast((kind, name, args))

    def _follow(self, tasks: Mapping[str, Callable[..., Any]]) -> Any:
        """Run the tasks that the leader calls; return the result of its `draw`."""
        while True:
            message: Any = self.broadcast(None)
            kind, *args = message
            if kind == _END:
                return args[0]
            if kind == _FAIL:
                raise args[0]
            name, items = args
            if kind == _SHARE:
                self._share(tasks[name], items)
                continue
            result = tasks[name](*items)
            if isinstance(result, Iterator):
                deque(result, maxlen=0)

    def _share(self, task: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Run this rank's share of a task; the leader returns all results.

        Each rank has equally many items, because a pass under FSDP needs every rank: one that has
        none left takes the first again.
        """
        passes = -(-len(items) // self.size)
        mine = [self.rank + number * self.size for number in range(passes)]
        results = [task(items[i] if i < len(items) else items[0]) for i in mine]
        gathered: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(results, gathered, dst=0, group=self._group)
        if gathered is None:
            return []
        return [gathered[i % self.size][i // self.size] for i in range(len(items))]
