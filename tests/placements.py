"""Where an engine may run besides the trainer's process: a child process, or an actor of Ray."""

import pytest

from lit_rlsched.engines import ProcessEngine, RayEngine

on_ray = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]
"""Marks of a test that needs a cluster: all run in one worker of the tests."""
PLACEMENTS = [
    pytest.param(ProcessEngine, id="process"),
    pytest.param(RayEngine, id="ray", marks=on_ray[:2]),
]
