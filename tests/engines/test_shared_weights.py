import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lit_rlsched.engines import ProcessEngine, TransformersEngine, VLLMEngine
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.engines.weights import WeightsFile

TENSORS = {
    "a": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "strided": torch.arange(12.0).reshape(3, 4).T,
    "trained": torch.nn.Parameter(torch.ones(2, 3)),
}


def check(weights, tensors):
    read = dict(weights)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor.detach())


def test_weights_are_shared_as_they_are():
    file = WeightsFile()
    weights = file.write(TENSORS.items())
    assert os.path.exists(weights.path)
    check(weights, TENSORS)
    file.close()
    assert not os.path.exists(weights.path)


def test_what_was_written_before_is_replaced():
    file = WeightsFile()
    first = file.write(TENSORS.items())
    fewer = {name: TENSORS[name] + 1 for name in ("scalar", "a")}
    second = file.write(fewer.items())
    assert second.size < first.size
    check(second, fewer)
    check(file.write(TENSORS.items()), TENSORS)
    file.close()


def test_another_process_reads_them():
    file = WeightsFile()
    weights = file.write(TENSORS.items())
    script = (
        "import pickle, sys; print({n: t.sum().item() for n, t in pickle.load(sys.stdin.buffer)})"
    )
    read = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(weights), capture_output=True, check=True
    )
    assert read.stdout.decode().strip() == str({n: t.sum().item() for n, t in TENSORS.items()})
    file.close()


def bf16_of_matrices(tensors):
    return {n: t.bfloat16() if t.ndim > 1 and t.is_floating_point() else t for n, t in tensors}


def test_matrices_are_rounded_before_they_are_copied():
    tensors = {**TENSORS, "ids": torch.arange(6).reshape(2, 3), "norm": torch.ones(8)}
    file = WeightsFile()
    check(file.write(tensors.items(), torch.bfloat16), bf16_of_matrices(tensors.items()))
    file.close()


class Worker:
    """In place of vLLM's: reads nothing."""

    size = 0

    def collective_rpc(self, method, args):
        self.size = args[0].size

    def reset_prefix_cache(self):
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_processes_get_weights_in_the_engines_precision(dtype, tiny_policy):
    """In bf16 half of the bytes are copied and written, but for norms."""
    weights = dict(tiny_policy.named_parameters())
    expected = sum(t.nbytes for t in weights.values())
    if dtype == torch.bfloat16:
        expected = sum(t.numel() * (2 if t.ndim > 1 else 4) for t in weights.values())
        assert expected < 0.51 * sum(t.nbytes for t in weights.values())
    spec = EngineSpec("", 2, 8, (), dtype=dtype)

    child = ProcessEngine(TransformersEngine())
    child._spec, child._store, child._child = spec, WeightsFile(), object()
    child._insist = lambda *message: sizes.append(message[2].size)
    sizes = []
    child.sync_weights(weights.items(), 1)
    child._store.close()

    split = VLLMEngine(tensor_parallel_size=2)
    split._engine, split._spec, split._apart = Worker(), spec, True
    split._noise = SimpleNamespace(forget=lambda: None)
    split.sync_weights(weights.items(), 1)
    assert sizes == [split._engine.size] == [expected]


def test_what_engines_may_keep_in_fp32_is_not_rounded_on_the_way():
    names = {
        "layers.0.mlp.gate_proj.weight": torch.bfloat16,
        "layers.0.mlp.gate.weight": torch.float32,  # a router of experts
        "layers.0.mlp.router.weight": torch.float32,
        "layers.0.norm.weight": torch.float32,
        "half": torch.float16,
    }
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    sent = {n: vector if "norm" in n else matrix for n in names} | {"half": matrix.half()}
    file = WeightsFile()
    assert {n: t.dtype for n, t in file.write(sent.items(), torch.bfloat16)} == names
    file.close()
