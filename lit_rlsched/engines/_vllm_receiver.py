"""Functions that `collective_rpc` runs next to vLLM's model, for vLLM's weight-transfer API.

The trainer's side is `weight_transfer.py`. On CPU, tests run them with stand-ins for CUDA IPC and
NCCL; they have not run on a GPU.
"""

import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from lit_rlsched.engines._vllm_worker import loaded, noting
from lit_rlsched.engines.weights import gpu_of
from lit_rlsched.settings import RunFailed

WIRE = {"packed": True, "packed_buffer_size_bytes": sys.maxsize, "packed_num_buffers": 1}
"""One buffer for each message, whatever its size: the trainer cuts the buckets."""


def gpu(worker: Any) -> str:
    """Return the UUID of the worker's GPU."""
    return gpu_of(worker.device)


def join(worker: Any, init: Mapping[str, Any]) -> None:
    """Make the connection with the trainer, in place of an earlier one."""
    engine = worker.weight_transfer_engine
    engine.shutdown()
    worker.init_weight_transfer_engine(known(engine.init_info_cls, {**WIRE, **init}))
    check_nccl(getattr(engine, "model_update_group", None))


def receive(worker: Any, update: Mapping[str, Any], first: bool, last: bool) -> None:
    """Load a bucket of weights."""
    engine, runner, model = worker.weight_transfer_engine, worker.model_runner, worker.get_model()
    if first:
        if hasattr(runner, "received"):
            worker.finish_weight_update()
        worker.start_weight_update()
        runner.received = set()
    with noting(model) as written:
        worker.update_weights(known(engine.update_info_cls, {**WIRE, **update}))
    runner.received |= written
    if last:
        worker.finish_weight_update()
        loaded(worker, runner.received)
        del runner.received


def known(info: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass; releases of vLLM keep `WIRE` in others."""
    names = {each.name for each in fields(info)}
    return {name: value for name, value in values.items() if name in names}


def open_group(address: str, port: int, world_size: int) -> Any:
    """Open the trainer's end of an NCCL group, as rank 0, on the current GPU; waits for the others.

    vLLM was imported before (`_vllm_guest.import_vllm`).
    """
    nccl: Any = import_module("vllm.distributed.weight_transfer.nccl_common")
    group = nccl.trainer_init(
        {"master_address": address, "master_port": port, "world_size": world_size}
    )
    check_nccl(group)
    return group


def check_nccl(group: Any) -> None:
    """Refuse a group that would send nothing and say nothing."""
    if group is not None and group.disabled:
        raise RunFailed(
            "`weight_transfer='nccl'`: vLLM cannot load NCCL, or `VLLM_DISABLE_PYNCCL` is set. "
            "Leave `weight_transfer` out: weights then go through host memory."
        )
