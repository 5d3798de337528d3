"""A server of OpenEnv with a number to guess: `openenv_server.py PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="A number from 1 to 31.")


class Said(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, highest=31, **kwargs):
        self._number = random.Random(seed).randint(1, highest)
        self._state = State(step_count=0)
        return Said(text=f"1 to {highest}")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == self._number:
            return Said(text="right", done=True, reward=1.0)
        return Said(text="higher" if self._number > action.number else "lower", reward=0.0)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Game, Guess, Said, env_name="guess", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
