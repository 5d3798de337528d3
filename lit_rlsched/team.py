"""The processes of a run: one draws the rollouts, and all of them run the policy together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Team:
    """The only process of a run; `distributed_team.DistributedTeam` stands for several.

    Rank 0 leads: it alone has the engine, the reward workers and the pool. What runs the policy is
    a *task*, which every rank runs when the leader does, because a rank may hold only a part of the
    weights.
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
        """Run `draw` on the leader, while the others run the tasks that it calls.

        Returns:
            The result of `draw`, on every rank.
        """
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
