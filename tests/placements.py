"""Where an engine may run besides the trainer's process: a child process, or an actor of Ray."""

from typing import Any

import pytest
from _pytest.mark import ParameterSet

from lit_rlsched.engines import ProcessEngine, RayEngine

on_ray = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]
"""Marks of a test that needs a cluster: all run in one worker of the tests."""


def process(*values: Any) -> ParameterSet:
    """Parameters of a test with a child process."""
    return pytest.param(ProcessEngine, *values, id="-".join(map(str, ["process", *values])))


def ray(*values: Any) -> ParameterSet:
    """Parameters of a test with an actor."""
    name = "-".join(map(str, ["ray", *values]))
    return pytest.param(RayEngine, *values, id=name, marks=on_ray[:2])


PLACEMENTS = [process(), ray()]
process_only = pytest.mark.parametrize("placement", [process()], indirect=True)
"""For tests of what is the same in an actor, where each start of an engine takes seconds."""
