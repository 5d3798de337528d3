"""Several processes of a run: messages from the leader to the others, and what they do together."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rlsched.team import Team
from lit_rlsched.team_watch import TeamWatch

T = TypeVar("T")
R = TypeVar("R")

_END, _FAIL, _CALL, _SHARE = "end", "fail", "call", "share"


class RankFailed(RuntimeError):
    """Another rank has failed, so this one ends too."""


class DistributedTeam(Team):
    """The ranks of a Trainer, after the process group of its strategy was made.

    Messages have a group of their own on the CPU. It has no time limit, because the others wait in
    it for a whole rollout, while a wait in the strategy's group is an error after its time limit.
    `TeamWatch` ends the wait if a rank dies or stops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self.messages = 0
        """Number of messages so far, for benchmarks."""
        self.leading = False
        self._watch = TeamWatch(self.rank, self.all_gather)

    def lead(self, draw: Callable[[], T], tasks: Mapping[str, Callable[..., Any]]) -> T:
        if not self.leads:
            return self._follow(tasks)
        self.leading = True
        try:
            result = draw()
        except BaseException as error:
            self._tell(_FAIL, _portable(error))
            raise
        finally:
            self.leading = False
        self._tell(_END, result)
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
        self.messages += 1
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        self.messages += 1
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def failed(self, error: BaseException) -> None:
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
        self._tell(kind, name, args)

    def _tell(self, *message: Any) -> None:
        self.broadcast(message)

    def _follow(self, tasks: Mapping[str, Callable[..., Any]]) -> Any:
        """Run the tasks that the leader calls; return what it has drawn."""
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
        turns = -(-len(items) // self.size)
        mine = [self.rank + turn * self.size for turn in range(turns)]
        results = [task(items[i] if i < len(items) else items[0]) for i in mine]
        gathered: list[Any] | None = [None] * self.size if self.leads else None
        self.messages += 1
        dist.gather_object(results, gathered, dst=0, group=self._group)
        if gathered is None:
            return []
        return [gathered[i % self.size][i // self.size] for i in range(len(items))]


def _portable(error: BaseException) -> BaseException:
    """Return an exception that can be sent to other ranks and says where it comes from."""
    if isinstance(error, SIGTERMException):
        return SIGTERMException(*error.args)
    return RankFailed(f"Rank 0, which draws, has failed: {type(error).__name__}: {error}")
