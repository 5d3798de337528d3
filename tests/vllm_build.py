"""Marks the tests that name vLLM's engine; skips those of the CPU build on the GPU build."""

from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

import pytest

REASON = "needs vLLM's build for CPU"
REFUSAL = "the run is on the CPU, and this vLLM decodes on"
"""What `VLLMEngine` says where a test starts it on the CPU."""


def for_cpu() -> bool:
    """Whether no other build than that for CPU is installed."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True


def names_vllm(function: Any) -> bool:
    """Whether a function, or a function inside it, mentions `VLLMEngine`."""
    codes = [getattr(function, "__code__", None)]
    for code in filter(None, codes):
        if "VLLMEngine" in code.co_names + code.co_freevars:
            return True
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark; skip tests that start the CPU build in another process: its refusal stays there."""
    for item in items:
        in_parameters = "VLLMEngine" in item.name.partition("[")[2]
        if in_parameters or names_vllm(getattr(item, "function", None)):
            item.add_marker("vllm")
        if in_parameters and not for_cpu():
            item.add_marker(pytest.mark.skip(reason=REASON))


def skipping() -> Generator[None, object, object]:
    """Turn the refusal into a skip."""
    try:
        return (yield)
    except Exception as error:
        if REFUSAL in str(error) and not for_cpu():
            pytest.skip(REASON)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    """An engine that a fixture starts."""
    return (yield from skipping())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """An engine that a test starts."""
    return (yield from skipping())
