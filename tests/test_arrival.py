"""Ranks that wait for each other: what a rank says, when, and when it ends."""

import os
import re
import socket
import threading
import time
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from types import SimpleNamespace

import pytest
from lightning.pytorch.trainer.states import TrainerStatus

from lit_rlsched.ranks import TeamWatch
from lit_rlsched.run import same_ranks
from lit_rlsched.settings import UsageError


def trainer(host="127.0.0.1", port=1, rank=1, limit=1800.0, nodes=2):
    environment = SimpleNamespace(main_address=host, main_port=port)
    return SimpleNamespace(
        strategy=SimpleNamespace(
            cluster_environment=environment, _timeout=timedelta(seconds=limit)
        ),
        global_rank=rank,
        local_rank=0,
        world_size=nodes,
        num_nodes=nodes,
        state=SimpleNamespace(status=TrainerStatus.RUNNING),
    )


@pytest.fixture
def leader():
    """A socket at which rank 0 would listen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_why_rank_0_cannot_be_reached(leader):
    def why(**place):
        return same_ranks._Waiting(trainer(**place)).obstacle()

    assert why(port=leader) is None
    assert "nothing answers at 127.0.0.1:1 (" in why(port=1)
    assert "nothing answers at [::1]:1 (" in why(host="::1", port=1)
    assert "nothing answers at 127.0.0.1:295000 (" in why(port=295_000)
    assert "`MASTER_ADDR=no..host` is not known here" in why(host="no..host")


def test_it_says_every_thirty_seconds_why_it_waits(monkeypatch, capsys, leader):
    seconds = 0.0
    monkeypatch.setattr(same_ranks, "time", SimpleNamespace(monotonic=lambda: seconds))
    waiting = same_ranks._Waiting(trainer(port=leader, limit=100.0))
    told = []
    for seconds in range(0, 125, 5):  # noqa: B007  # the clock
        told.append(waiting.overdue("why") if waiting.is_due else None)
    said = re.findall(
        r"Rank 1 on \S+ has waited for the others for (\d+) s: why\.", capsys.readouterr().err
    )
    assert said == ["30", "60", "90"]
    assert [
        seconds for seconds, message in zip(range(0, 125, 5), told, strict=True) if message
    ] == [120]
    seconds = 200
    assert f"127.0.0.1:{leader} answers, but some ranks are not there" in waiting.overdue(None)


def test_the_limit_is_that_of_the_strategy(monkeypatch):
    monkeypatch.setattr(same_ranks, "SLOW", 0.1)
    with pytest.raises(UsageError, match=r"nothing answers at 127\.0\.0\.1:1 "):
        same_ranks.await_ranks(trainer(limit=0.5))


def test_a_port_that_another_run_has(monkeypatch, leader):
    first = trainer(port=leader, rank=0)
    with pytest.raises(
        UsageError, match=rf"`MASTER_PORT={leader}` cannot be opened on \S+ \(.*in u"
    ):
        same_ranks.await_ranks(first)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun has it, for this run
    monkeypatch.setattr(same_ranks._Waiting, "watch", lambda self, is_over: None)
    same_ranks.await_ranks(first)


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_waits_in_vain_ends(monkeypatch, leader, comes):
    ended, team = threading.Event(), object()
    monkeypatch.setattr(same_ranks, "SLOW", 0.1)
    monkeypatch.setattr(same_ranks, "_RETRY", 0.05)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(
        same_ranks, "DistributedTeam", lambda: team if comes else ended.wait(20) and team
    )
    assert same_ranks.make_team(trainer(port=leader, rank=0, limit=0.3)) is team
    if comes:
        time.sleep(0.6)
    assert ended.is_set() != comes


def test_one_machine_and_a_group_that_is_there_wait_for_nobody(monkeypatch):
    monkeypatch.setattr(same_ranks, "_Waiting", lambda trainer: pytest.fail("waits"))
    same_ranks.await_ranks(trainer(nodes=1))
    monkeypatch.setattr(same_ranks.dist, "is_initialized", lambda: True)
    same_ranks.await_ranks(trainer())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_strangers_do_not_end_the_start_of_a_team(monkeypatch, host):
    """Two say nothing until the end, one has another key, and one leaves at once."""
    try:
        socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ).close()
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    monkeypatch.setenv("MASTER_ADDR", host)
    values, all_there = [None, None], threading.Barrier(2)
    made, strangers = {}, []

    def of(rank):
        def all_gather(value):
            values[rank] = value
            all_there.wait()
            if rank == 1:
                *_, port, _ = values[0]
                strangers.extend(socket.create_connection((host, port)) for _ in range(2))
                socket.create_connection((host, port)).close()
                other = Connection(socket.create_connection((host, port)).detach())
                with pytest.raises(AuthenticationError):
                    answer_challenge(other, b"another")
            return values

        made[rank] = TeamWatch(rank, all_gather)

    threads = [threading.Thread(target=of, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [*sorted(made)] == [0, 1]
    for stranger in strangers:
        stranger.close()
    made[1].tell("an error")
    cause = made[0].cause(20)
    made[0].close()  # else it ends this process, as it would a run
    assert "has failed: an error" in cause
