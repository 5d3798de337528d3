"""Functions that `collective_rpc` runs next to vLLM's model, with the worker as first argument.

They run in the trainer's process, or in each worker process when the model is split.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_rlsched.settings import RunFailed, UsageError
from lit_rlsched.types import Request, stable_hash

NOISE = "lit_rlsched_noise"
"""Entry of a request's `extra_args` with its key, followed by the keys to forget."""


class Noise:
    """The keys under which the generators of requests are kept."""

    def __init__(self, by_position: bool) -> None:
        self._by_position = by_position
        self._keys = count()
        self._running: dict[str, int] = {}  # request id -> key
        self._kept: dict[str, tuple[int, int, int]] = {}  # request id -> seed, length, key
        self._ended: list[int] = []  # keys that are no longer needed

    def seed(self, request: Request) -> int:
        """Seed for vLLM; a kept generator of the request is used instead of it."""
        drawn = len(request.prefix_ids)
        if drawn == 0 or self._by_position:
            return request.seed
        # the noise that chose the prefix must not be used again: given the prefix, it is not random
        return stable_hash(request.seed, drawn)

    def enter(self, request: Request) -> dict[str, list[int]]:
        """`extra_args` for a request that is submitted."""
        seed, length, key = self._kept.pop(request.id, (None, None, None))
        if key is None or (seed, length) != (request.seed, len(request.prefix_ids)):
            if key is not None:
                self._ended.append(key)
            key = next(self._keys)
        self._running[request.id] = key
        ended, self._ended = self._ended, []
        return {NOISE: [key, *ended]}

    def leave(self, request: Request, length: int | None) -> None:
        """Keep the noise of a request that may come back with `length` tokens; None: it ended."""
        key = self._running.pop(request.id)
        if length is None:
            self._ended.append(key)
        else:
            self._kept[request.id] = request.seed, length, key

    def forget(self) -> None:
        """Drop all kept keys: requests that come back are drawn by other weights."""
        self._ended += (key for *_, key in self._kept.values())
        self._kept.clear()


class KeptNoise:
    """Replaces `InputBatch.add_request` so that generators outlive their requests.

    When the model is split over processes, each of them draws every token and keeps the same
    generators.
    """

    def __init__(self, batch: Any) -> None:
        self.generators: dict[int, torch.Generator | None] = {}
        self._add_request = batch.add_request
        batch.add_request = self

    def __call__(self, state: Any) -> Any:
        """Called before the first draw of a request, and again after a preemption."""
        key, *ended = (state.sampling_params.extra_args or {}).get(NOISE, (None,))
        for old in ended:
            self.generators.pop(old, None)
        if key is not None:  # vLLM's own warm-up requests have none
            state.generator = self.generators.setdefault(key, state.generator)
        return self._add_request(state)


ADAPTER = 1
"""vLLM's id of the policy's adapters."""


def prepare(worker: Any) -> bool:
    """Patch a worker that was just built."""
    if multiprocessing.parent_process() is not None:
        # Ctrl-C in a terminal reaches all processes, and the trainer needs this one to stop cleanly
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sampler: Any = import_module("vllm.v1.sample.sampler")
    # the rank is not used here, but its torch.compile delays the first step by seconds
    sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)
    runner = worker.model_runner
    by_position = hasattr(runner, "req_states")
    if not by_position:
        batch = getattr(runner, "input_batch", None)
        if not hasattr(batch, "generators"):
            raise UsageError(
                f"`VLLMEngine` does not know vLLM's model runner `{type(runner).__name__}`. "
                "Install a version of vLLM that lit_rlsched allows."
            )
        runner.kept_noise = KeptNoise(batch)
    return by_position


def unlink_shared_memory(worker: Any) -> str:
    """Unlink the shared memory of the CPU workers, which vLLM would leave behind.

    All workers have opened it by now and keep it until they end.
    """
    run = os.environ.get("VLLM_DIST_IDENT")
    for path in Path("/dev/shm").glob(f"{run}-*-cpushm_*") if run else ():
        path.unlink(missing_ok=True)
    return str(getattr(worker, "distributed_init_method", ""))


def load(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights under their Hugging Face names."""
    worker.reload_weights(weights_iterator=iter(weights))
    repack_embeddings(worker.get_model())


def load_adapters(worker: Any, adapters: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the LoRA adapters in the model's only slot.

    vLLM reads adapters from a folder in peft's format, so they are written to a temporary one.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapters}
    rank = max(len(a) for name, a in tensors.items() if name.endswith("lora_A.weight"))
    # a scale of 1, as matrices B include it
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
    with TemporaryDirectory(prefix="lit_rlsched-adapters-") as folder:
        save_file(tensors, Path(folder, "adapter_model.safetensors"))
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        worker.add_lora(lora_request(folder))
    slot = worker.model_runner.lora_manager._adapter_manager
    if lost := sorted(slot.get_adapter(ADAPTER).loras.keys() - slot.modules.keys()):
        raise UsageError(
            f"`VLLMEngine(enable_lora=True)`: vLLM's model has no LoRA slot for {len(lost)} layers "
            f"with adapters, of which the first is `{lost[0]}`. Leave `enable_lora` out: adapters "
            "are then merged."
        )


def lora_request(folder: str | None = None) -> Any:
    """Return the request for the policy's adapters: to load them from a folder, or to use them."""
    return import_module("vllm.lora.request").LoRARequest(
        lora_name="policy",
        lora_int_id=ADAPTER,
        lora_path=folder or "already loaded",
        load_inplace=folder is not None,
    )


def repack_embeddings(model: torch.nn.Module) -> None:
    """Repack tied heads: on CPU a reload leaves the packed copy of the old weights in use."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod":
            method.process_weights_after_loading(module)


WIRE = {"packed": True, "packed_buffer_size_bytes": sys.maxsize, "packed_num_buffers": 1}
"""One buffer for each message, whatever its size: the trainer cuts the buckets."""


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, by which vLLM names it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu(worker: Any) -> str:
    """Return the UUID of the worker's GPU."""
    return gpu_of(worker.device)


def join(worker: Any, init: Mapping[str, Any]) -> None:
    """Make the connection with the trainer."""
    engine = worker.weight_transfer_engine
    worker.init_weight_transfer_engine(known(engine.init_info_cls, {**WIRE, **init}))
    check_nccl(engine.model_update_group)


def receive(worker: Any, update: Mapping[str, Any], first: bool, last: bool) -> None:
    """Load a bucket of weights."""
    if first:
        worker.start_weight_update()
    worker.update_weights(known(worker.weight_transfer_engine.update_info_cls, {**WIRE, **update}))
    if last:
        worker.finish_weight_update()
        repack_embeddings(worker.get_model())


def known(info: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass; releases of vLLM keep `WIRE` in others."""
    names = {each.name for each in fields(info)}
    return {name: value for name, value in values.items() if name in names}


def open_group(where: Mapping[str, Any]) -> Any:
    """Open the trainer's end of an NCCL group, as rank 0, on the current GPU; waits for the others.

    vLLM was imported before (`_vllm_guest.import_vllm`).
    """
    group = import_module("vllm.distributed.weight_transfer.nccl_common").trainer_init(where)
    check_nccl(group)
    return group


def check_nccl(group: Any) -> None:
    """Refuse a group that would send nothing and say nothing."""
    if group.disabled:
        raise RunFailed(
            "`weight_transfer='nccl'`: vLLM cannot load NCCL, or `VLLM_DISABLE_PYNCCL` is set. "
            "Leave `weight_transfer` out: weights then go through host memory."
        )
