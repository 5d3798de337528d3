"""Two ranks of a `DistributedTeam` without a Trainer: `main` runs a check on both."""

import os
import sys
import traceback
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.device_mesh import init_device_mesh

from lit_rlsched.engines import weight_transfer, weights
from lit_rlsched.ranks import DistributedTeam, RankFailed
from lit_rlsched.run import fsdp2
from lit_rlsched.training.policy import load_policy, named_weights
from lit_rlsched.training.weight_sync import PolicyReader


def raised(call):
    """The error that a call ends with."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def check_team(rank, team):
    seen = []

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


def check_packed_weights(rank, team, model):
    """Sharded weights, whole and in half precision, in buckets."""
    policy = load_policy(model)
    whole = {name: weight.clone() for name, weight in named_weights(policy)}
    fsdp2.shard(policy, init_device_mesh("cpu", (2,)))
    assert len(next(policy.parameters()).to_local()) < len(next(iter(whole.values())))
    reader = PolicyReader(policy, team=team)
    weight_transfer.buckets = partial(weights.buckets, limit=30_000)

    def unpacked(found):
        for packed in found:
            kinds = zip(packed.dtypes, packed.shapes, strict=True)
            parts = packed.data.split([dtype.itemsize * prod(shape) for dtype, shape in kinds])
            for name, dtype, shape, part in zip(
                packed.names, packed.dtypes, packed.shapes, parts, strict=True
            ):
                yield name, part.view(dtype).view(shape)

    def draw():
        source = reader.weights()
        assert dict(source).keys() == whole.keys()
        found = [*source.packed(torch.bfloat16)]
        assert len(found) > 3 and [packed.last for packed in found].count(True) == 1
        sent = dict(unpacked(found))
        assert sent.keys() == whole.keys()
        for name, tensor in sent.items():
            assert torch.equal(tensor, whole[name].to(tensor.dtype)), name
            assert tensor.dtype == (torch.bfloat16 if tensor.ndim > 1 else torch.float32)
        broken = source.packed(torch.bfloat16)
        next(broken)
        broken.close()  # the other rank is in step nevertheless
        return len(whole)

    assert team.lead(draw, reader.tasks) == len(whole)


def main(folder, check=check_team, *arguments):
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                meet = f"file://{folder}/meet"
                dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
                team = DistributedTeam()
                check(rank, team, *arguments)
                team.close()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in pids]))
