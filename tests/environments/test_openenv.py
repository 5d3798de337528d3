"""Environments behind a real OpenEnv server on loopback."""

import os
import random
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from lit_rlsched.environments import openenv as module
from lit_rlsched.environments.openenv import openenv
from lit_rlsched.environments.protocol import Environments
from lit_rlsched.environments.scheduler import EnvironmentScheduler
from lit_rlsched.rewards.scheduler import RewardScheduler
from lit_rlsched.settings import UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with OpenEnv, whose requirements vLLM does not allow."""
    folder = tmp_path_factory.mktemp("openenv")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*install, "-r", str(ROOT / "requirements/openenv.txt")])
    if done.returncode:
        pytest.skip("OpenEnv cannot be installed here")
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def url(packages):
    script, port = ROOT / "tests/openenv_server.py", free_port()
    environment = os.environ | {"PYTHONPATH": str(packages)}
    server = subprocess.Popen([sys.executable, str(script), str(port)], env=environment)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while True:
        try:
            urlopen(f"{address}/schema", timeout=1).close()
            break
        except URLError:
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.1)
    yield address
    server.kill()
    server.wait()


@pytest.mark.slow
def test_the_action_is_a_tool_with_its_types(url):
    (schema,) = Environments(None, url).of({}).schemas
    assert schema["function"] == {
        "name": "step",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "A number from 1 to 31."}},
            "required": ["number"],
        },
    }
    environment = Environments(None, {"game": openenv(url, "guess")}).by_name["game"]
    assert environment.methods == ("guess",) and environment.seeded


def play(scheduler, keys, ask):
    for key in keys:
        ask(key)
    found = {}
    while len(found) < len(keys):
        scheduler.wait(10.0)
        found |= {answer.key: answer for answer in scheduler.poll()}
    return found


@pytest.mark.slow
def test_sessions_of_a_server_are_those_of_completions(url):
    """More at once than a worker has processes, each with its own number by the seed."""
    environments = Environments(None, openenv(url, "guess"))
    rewards = RewardScheduler(environments.rewards, environments=True)
    scheduler = EnvironmentScheduler(environments, rewards, workers=2)
    try:
        for _ in range(2):  # the second time with the connections of the first
            keys = [*range(40)]
            opened = play(
                scheduler,
                keys,
                lambda key: scheduler.open(key, None, {"seed": key, "highest": 9, "prompt": []}),
            )
            assert {answer.result for answer in opened.values()} == {"1 to 9"}
            numbers = {key: random.Random(key).randint(1, 9) for key in keys}
            first = play(
                scheduler, keys, lambda key: scheduler.call(key, [("guess", {"number": 5})])
            )
            for key, answer in first.items():
                n = numbers[key]
                said = "right" if n == 5 else "higher" if n > 5 else "lower"
                assert answer.result == [("guess", said, False)]
            calls = [("guess", {"number": numbers[0]}), ("guess", {"number": 1})]
            (over,) = play(scheduler, [0], partial(scheduler.call, calls=calls)).values()
            assert [said for _, said, _ in over.result][-1] == "{'error': 'The episode is over.'}"
            (wrong,) = play(
                scheduler, [1], lambda key: scheduler.call(key, [("guess", {"n": 1})])
            ).values()
            assert wrong.result[0][2]
            scheduler.end_round()
    finally:
        scheduler.shut_down()
        rewards.close()


@pytest.mark.slow
def test_a_lost_connection_costs_the_episode_and_not_the_next(url):
    game = openenv(url, "guess")()
    game.reset(seed=3)
    assert game.guess(number=32) == "lower"
    game._socket.close()
    with pytest.raises(Exception, match=r"closed|sent 1000"):
        game.guess(number=1)
    with pytest.raises(RuntimeError, match="connection was lost"):
        game.guess(number=1)
    with pytest.raises(RuntimeError, match="was lost in an episode"):
        game.get_reward()
    game.reset(seed=3)
    game._socket.close()  # the server begins anew between two episodes
    assert game.reset(seed=3, highest=9) == "1 to 9" and game.get_reward() == 0.0
    with pytest.raises(RuntimeError):
        game.reset(seed=[{}])
    assert game._socket is None
    assert game.reset(seed=3, highest=9) == "1 to 9"
    classes = {"a": openenv(url), "b": openenv(url.replace("127.0.0.1", "localhost"))}
    assert len({reward.__name__ for reward in Environments(None, classes).rewards}) == 2


@pytest.mark.slow
def test_what_is_no_server_is_refused(url, monkeypatch):
    with pytest.raises(UsageError, match=r"no OpenEnv server answers at http://127.0.0.1:9/schema"):
        Environments(None, "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"no OpenEnv server answers"):
        openenv(f"{url}/docs")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'lit-rlsched\[openenv\]'"):
        openenv(url)


def test_an_action_with_a_union_is_refused():
    action = {"properties": {"move": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}
    with pytest.raises(UsageError, match="the field `move` of the action is a union"):
        module._tool("http://here", "step", action)
