"""What runs beside vLLM's model, in each process that holds it or a part of it.

Functions that `collective_rpc` calls with the worker: in the trainer's process where the model is
whole, else in the workers'.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lit_rlsched._environment import hide_environment
from lit_rlsched.engines._unsynced import copies, copy_back, unsynced

NOISE = "lit_rlsched_noise"
"""Under it a request says, in its sampling parameters, which noise is its own."""


def prepare(worker: Any) -> str:
    """Patch a worker that was just built.

    Returns:
        How it draws: `by_request`, with a generator for each request, which it keeps from now on;
        `by_position`; or the name of a model runner that is not known.
    """
    hide_environment()  # reward workers may read it
    if multiprocessing.parent_process() is not None:
        # Ctrl-C in a terminal goes to all processes: the trainer still needs this one to stop well
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sampler: Any = import_module("vllm.v1.sample.sampler")
    # nobody reads the rank, but its torch.compile holds up the first step for seconds
    sampler.batched_count_greater_than = lambda logprobs, values: (logprobs >= values).sum(-1)
    runner = worker.model_runner
    if hasattr(runner, "req_states"):
        return "by_position"
    batch = getattr(runner, "input_batch", None)
    if not hasattr(batch, "generators"):
        return type(runner).__name__
    runner.kept_noise = KeptNoise(batch)
    return "by_request"


def take_names_away(worker: Any) -> str:
    """Unlink the memory over which workers on CPU exchange tensors: vLLM would leave it behind.

    All of them have opened it by now, and whoever has keeps it until it ends, however it ends.

    Returns:
        Where the workers have met.
    """
    run = os.environ.get("VLLM_DIST_IDENT")
    for path in Path("/dev/shm").glob(f"{run}-*-cpushm_*") if run else ():
        path.unlink(missing_ok=True)
    return str(getattr(worker, "distributed_init_method", ""))


def load(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights under their Hugging Face names, and forget the noise of the old ones."""
    with _noting_loads(worker.get_model()) as written:
        worker.reload_weights(weights_iterator=iter(weights))
    worker.model_runner.written = written
    repack_embeddings(worker.get_model())
    if kept := getattr(worker.model_runner, "kept_noise", None):
        kept.generators.clear()


@contextmanager
def _noting_loads(model: Any) -> Iterator[set[str]]:
    """Names of the parameters that are loaded inside, as far as the model says them."""
    load_weights = model.load_weights
    written: set[str] = set()

    def noting(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded: set[str] | None = load_weights(weights)
        written.update(loaded or ())
        return loaded

    model.load_weights = noting
    try:
        yield written
    finally:
        del model.load_weights


def keep(worker: Any) -> None:
    """Copy to the host what vLLM would lose in its sleep and no sync brings back.

    It gives up the memory of the weights with all that was made beside them. Named buffers it keeps
    itself; parameters come with the sync, if the trainer has them: before the first sync, none do.
    """
    written = getattr(worker.model_runner, "written", ())
    worker.model_runner.kept_tensors = copies(unsynced(worker.get_model(), written))


def put_back(worker: Any) -> None:
    """Undo `keep`, after vLLM has woken up."""
    copy_back(getattr(worker.model_runner, "kept_tensors", []))


def repack_embeddings(model: torch.nn.Module) -> None:
    """Pack tied heads anew: on CPU a reload leaves the packed copy of the old weights in use."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod":
            method.process_weights_after_loading(module)


class KeptNoise:
    """Stands in for `InputBatch.add_request`: the generators of requests outlive them.

    Each process of a model that is split draws every token, and so keeps the same.
    """

    def __init__(self, batch: Any) -> None:
        self.generators: dict[int, torch.Generator | None] = {}
        self._add_request = batch.add_request
        batch.add_request = self

    def __call__(self, state: Any) -> Any:
        """Called before any draw of a request, and again after a preemption."""
        key, *ended = (state.sampling_params.extra_args or {}).get(NOISE, (None,))
        for old in ended:
            self.generators.pop(old, None)
        if key is not None:  # else it is one of vLLM's own
            state.generator = self.generators.setdefault(key, state.generator)
        return self._add_request(state)
