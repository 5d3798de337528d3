"""Hosts for runs on several of them."""

import shutil

import hosts as made
import pytest
from nodes.launching import MODEL


@pytest.fixture
def hosts(tiny_model):
    """Two hosts, each with the model in a folder of its own."""
    if why := made.obstacle():
        pytest.skip(why)
    with made.hosts(2) as both:
        for host in both:
            shutil.copytree(tiny_model, host.path(MODEL))
        yield both
