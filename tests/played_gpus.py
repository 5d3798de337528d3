"""GPUs and NCCL played on a CPU: gloo is NCCL.

Everything else is real: engines in processes of their own, vLLM's workers and their weight-transfer
API, the ranks and where they meet.
"""

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from lit_rlsched.engines import VLLMEngine, _vllm_guest, weight_transfer
from lit_rlsched.engines._vllm_guest import import_vllm

LIMIT = timedelta(seconds=30)


class Group:
    """vLLM's `PyNcclCommunicator` over gloo."""

    disabled = False

    def __init__(self, address, port, rank, world_size):
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=LIMIT)
        self.group = dist.ProcessGroupGloo(store, rank, world_size, LIMIT)

    def broadcast(self, tensor, src, stream=None):
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()

    def destroy(self):
        self.group = None


def join(init, parallel_config):
    rank = init.rank_offset + parallel_config.rank
    return Group(init.master_address, init.master_port, rank, init.world_size)


def play(patch, gpu):
    """Play a process whose GPU has this UUID; `patch(owner, name, value)` sets an attribute."""
    properties = SimpleNamespace(uuid=gpu)
    stream = SimpleNamespace(synchronize=lambda: None)
    for owner, name, value in (
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "Stream", lambda: stream),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "device_count", lambda: 4),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda: None),
    ):
        patch(owner, name, value)


@torch.no_grad()
def perturb(policy):
    """Change every weight a little."""
    for parameter in policy.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.add_(0.02 * noise * parameter.abs().mean())


def play_trainer(monkeypatch):
    """Play the trainer on GPU-0."""

    play(monkeypatch.setattr, "GPU-0")
    monkeypatch.setattr(_vllm_guest, "import_vllm", lambda: None)  # the trainer's part is played

    def opened(where):
        return Group(where["master_address"], where["master_port"], 0, where["world_size"])

    monkeypatch.setattr(weight_transfer, "open_group", opened)


class PlayedGPUs(VLLMEngine):
    """vLLM on CPU in a process whose GPU follows from its index; ends in a sync if a file says so.

    Args:
        deadly: Path of the file; its text is the index of the engine and the signal that it gets.
    """

    def __init__(self, deadly: str) -> None:
        super().__init__()
        self.deadly = Path(deadly)

    def start(self, spec):
        import_vllm()
        play(setattr, f"GPU-{spec.first_gpu + spec.index}")
        transfer = "vllm.distributed.weight_transfer"
        import_module(f"{transfer}.nccl_engine").worker_init_process_group = join
        stream = SimpleNamespace(synchronize=lambda: None)
        import_module(f"{transfer}.packed_tensor")._get_streams = lambda *args: [stream]
        self.index = spec.index
        super().start(replace(spec, device=torch.device("cpu")))

    def receive_weights(self, update, first, last):
        if self.deadly.exists() and not first:
            index, name = self.deadly.read_text().split()
            if int(index) == self.index:
                self.deadly.unlink()
                os.kill(os.getpid(), signal.Signals[name])
        super().receive_weights(update, first, last)
