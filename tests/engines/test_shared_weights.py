import os
import pickle
import subprocess
import sys

import torch

from lit_rlsched.engines.shared_weights import WeightsFile

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
