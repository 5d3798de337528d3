"""Skips tests of vLLM's build for CPU where its build for GPUs is installed."""

from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what runs `VLLMEngine` in a process of its own: the refusal stays there."""
    for item in items if not for_cpu() else ():
        if "[" in item.name and "VLLMEngine" in item.name.partition("[")[2]:
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
