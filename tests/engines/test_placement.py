"""Which GPUs or cores each engine gets."""

from dataclasses import replace

import pytest
import torch

from lit_rlsched.engines import TransformersEngine, devices
from lit_rlsched.engines.devices import check_devices, cores_of, variables_of
from lit_rlsched.engines.pool import EnginePool
from lit_rlsched.engines.spec import EngineSpec
from lit_rlsched.settings import UsageError

ON_GPU = EngineSpec("", 8, 64, (1,), device=torch.device("cuda", 0), engines=4)
ON_CPU = replace(ON_GPU, device=torch.device("cpu"))


def of_each(spec: EngineSpec, size: int, environment: dict[str, str]) -> list[str]:
    specs = (replace(spec, index=i) for i in range(spec.engines))
    return [variables_of(s, size, environment)["CUDA_VISIBLE_DEVICES"] for s in specs]


def test_each_engine_sees_its_own_gpus() -> None:
    assert of_each(ON_GPU, 1, {}) == ["0", "1", "2", "3"]
    assert of_each(ON_GPU, 2, {}) == ["0,1", "2,3", "4,5", "6,7"]
    assert of_each(ON_GPU, 1, {"CUDA_VISIBLE_DEVICES": "6,2,GPU-a,3,1"}) == ["6", "2", "GPU-a", "3"]


def test_what_is_not_divided_stays() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    assert variables_of(replace(ON_GPU, engines=1), 1, environment) == {}
    assert variables_of(ON_CPU, 1, environment) == {}


def test_cores_are_shared_equally() -> None:
    def cores(engines: int, available: list[int]) -> list[list[int]]:
        specs = (replace(ON_CPU, index=i, engines=engines) for i in range(engines))
        return [cores_of(spec, available) for spec in specs]

    assert cores(2, [0, 1, 4, 5, 7]) == [[0, 1], [4, 5]]
    assert cores(3, [2, 3, 4]) == [[2], [3], [4]]
    assert cores(3, [2, 3]) == [[2, 3]] * 3, "too few: nobody is bound"


def test_more_engines_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    check_devices(ON_GPU, 1)
    check_devices(replace(ON_CPU, engines=99), 1)
    check_devices(replace(ON_GPU, engines=3), 2)
    with pytest.raises(UsageError, match=r"`num_engines=7`.*this node has 6\. Use 6 or less"):
        check_devices(replace(ON_GPU, engines=7), 1)
    with pytest.raises(UsageError, match=r"engine of 2 GPUs each needs .* Use 3 or less"):
        check_devices(ON_GPU, 2)


def test_a_model_is_split_over_its_share_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Splitting(TransformersEngine):
        def max_tensor_parallel_size(self, spec: EngineSpec) -> int:
            return 8

    monkeypatch.setattr(devices, "available_cores", lambda: list(range(9)))
    for engines, most in ((1, 8), (2, 4), (3, 2), (5, 1), (12, 1)):
        pool = EnginePool([Splitting() for _ in range(engines)])
        assert pool.max_tensor_parallel_size(ON_CPU) == most
    pool.tensor_parallel_size = 2
    assert [engine.tensor_parallel_size for engine in pool.engines] == [2] * 12
