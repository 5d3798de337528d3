"""Two ranks of a `DistributedTeam` without a Trainer: `main`."""

import os
import sys
import traceback

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_rlsched.distributed_team import DistributedTeam, RankFailed


def raised(call):
    """The error that a call ends with."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def check(rank, folder):
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    team, seen = DistributedTeam(), []

    def square(number):
        seen.append(number)
        return number * number

    def count(end):
        for number in range(end):
            seen.append(f"count {number}")
            yield number

    def draw():
        assert team.call("square", square, 4) == 16
        counted = team.iterate("count", count, 3)
        assert next(counted) == 0
        counted.close()
        assert team.share("square", square, []) == []
        assert team.share("square", square, [1, 2, 3]) == [1, 4, 9]
        return "drawn"

    def fail():
        raise ValueError("something is wrong")

    def stop():
        raise SIGTERMException

    tasks = {"square": square, "count": count}
    assert team.lead(draw, tasks) == "drawn"
    # each rank has equally many items of a share: rank 1 takes the first again
    assert seen == [4, "count 0", "count 1", "count 2", *([1, 3] if rank == 0 else [2, 1])], seen
    error = raised(lambda: team.lead(fail, tasks))
    if rank:
        assert isinstance(error, RankFailed)
        assert str(error) == "Rank 0, which draws, has failed: ValueError: something is wrong"
    else:
        assert isinstance(error, ValueError)
        assert "outside of `Team.lead`" in str(raised(lambda: team.call("square", square, 1)))
    assert isinstance(raised(lambda: team.lead(stop, tasks)), SIGTERMException)
    if rank == 0:
        team.failed(SIGTERMException())  # says nothing: every rank stops
    assert team.all_gather(rank) == [0, 1] and team.broadcast(rank) == 0
    team.close()


def main(folder):
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                check(rank, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
