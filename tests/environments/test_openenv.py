"""Environments behind a real OpenEnv server on loopback."""

import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from pydantic import BaseModel, Field, RootModel

from lit_rlsched.environments import openenv as module
from lit_rlsched.environments import protocol
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
            for key in keys:
                scheduler.close(key)
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


@pytest.mark.parametrize("end", ["", ":9", ":x", "?token=hunter22"])
def test_no_secret_of_an_address_is_shown_where_no_server_answers(end):
    with pytest.raises(UsageError, match="no OpenEnv server answers") as refused:
        openenv(f"http://user:hunter22@127.0.0.1{end}")
    assert "hunter22" not in str(refused.value)


def test_an_action_with_a_union_is_refused():
    action = {"properties": {"move": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}
    with pytest.raises(UsageError, match="the field `move` of the action is a union"):
        module._tool("http://here", "step", action)


class Move(StrEnum):
    NORTH = "north"
    SOUTH = "south"


class Piece(BaseModel):
    name: Literal["rook", "queen"]
    steps: int = Field(ge=1, le=7)


class Play(BaseModel):
    """Play a move.

    Not for the model.
    """

    number: int = Field(description="A number\n from 1 to 31.", ge=1, le=31)
    where: Move
    how: Literal["fast", "slow"] = "slow"
    tags: list[Literal["a", "b"]] = Field(max_length=3)
    piece: Piece
    other: Piece | None = None
    word: str = Field(pattern="^[a-z]{5}$", min_length=5)
    metadata: dict = {}


MOVES = {"type": "string", "enum": ["north", "south"]}
PIECE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["rook", "queen"], "title": "Name"},
        "steps": {"type": "integer", "minimum": 1, "maximum": 7, "title": "Steps"},
    },
    "required": ["name", "steps"],
}


def test_the_model_is_told_what_the_server_says_of_each_field():
    tool = module._tool("http://here", "play", Play.model_json_schema())
    assert protocol._schema(tool, "it")["function"] == {
        "name": "play",
        "description": "Play a move.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 31,
                    "description": "A number from 1 to 31.",
                },
                "where": {**MOVES, "description": "Move"},
                "how": {
                    "type": "string",
                    "enum": ["fast", "slow"],
                    "default": "slow",
                    "description": "How",
                },
                "tags": {
                    "type": "array",
                    "items": {"type": "string", "enum": ["a", "b"]},
                    "maxItems": 3,
                    "description": "Tags",
                },
                "piece": {**PIECE, "description": "Piece"},
                "other": {**PIECE, "default": None, "nullable": True, "description": "Piece"},
                "word": {
                    "type": "string",
                    "pattern": "^[a-z]{5}$",
                    "minLength": 5,
                    "description": "Word",
                },
            },
            "required": ["number", "where", "tags", "piece", "word"],
        },
    }


def test_an_action_that_has_several_forms_is_refused():
    either = RootModel[Play | Piece].model_json_schema()
    with pytest.raises(UsageError, match="the action is a union"):
        module._tool("http://here", "step", either)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "去北 Zürich", "done": False}, "去北 Zürich"),
        ({"text": "去北", "hint": "ü"}, '{"text": "去北", "hint": "ü"}'),
        ({"lines": ["🙂"], "score": 1}, '{"lines": ["🙂"], "score": 1}'),
        ("plain é", "plain é"),
    ],
)
def test_an_observation_is_read_as_its_characters(observation, text):
    assert module._text(observation) == text


class Sent(module.OpenEnv):
    """Keeps what is sent."""

    def __init__(self):
        super().__init__()
        self.sent = []
        self._socket = self

    def send(self, message):
        self.sent.append(json.loads(message)["data"])

    def recv(self):
        return json.dumps({"data": {"observation": "ok", "done": False}})


def test_arguments_that_no_server_reads_are_an_error_and_keep_the_session():
    game, tool = Sent(), module._tool("http://here", "play", Piece.model_json_schema())
    for odd in ({"name": "rook"}, {"name": "rook", "steps": 1, "self": 2}, {"name": math.nan}):
        with pytest.raises(TypeError, match=r"play\(\) has the arguments \['name', 'steps'\]"):
            tool(game, **odd)
    with pytest.raises(ValueError, match="not JSON compliant"):
        tool(game, name="rook", steps=math.inf)
    assert game.sent == [] and game._socket is game
    assert tool(game, name="rook", steps=3) == "ok" and game.sent == [{"name": "rook", "steps": 3}]
