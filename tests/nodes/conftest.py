"""Hosts for runs on several of them."""

import shutil
from types import SimpleNamespace

import hosts as made
import pytest
from nodes.launching import Server, result, start


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """The folder that the hosts share as `/mnt`."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def both(shared):
    """Two hosts for all tests."""
    if why := made.obstacle():
        pytest.skip(why)
    with made.hosts(2, shared) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def servers(both):
    return [Server(host) for host in both]


@pytest.fixture
def nodes(both, servers, tiny_model, tmp_path):
    """Two hosts, each with the model in a folder of its own, which other tests do not use."""
    folder = f"/tmp/{tmp_path.name}"
    for host in both:
        host.run("mkdir", folder)
        shutil.copytree(tiny_model, host.path(f"{folder}/model"))

    def run(name, on=servers, **more):
        return start(on, folder, name, **more)

    def finished(name, on=servers, **more):
        return result(on, folder, name, run(name, on, **more))

    yield SimpleNamespace(
        hosts=both,
        servers=servers,
        folder=folder,
        start=run,
        run=finished,
        result=lambda name, ranks: result(servers, folder, name, ranks),
    )
    for host in both:
        host.link(up=True)
