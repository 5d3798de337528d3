"""Tools and environments for tests, and a chat template whose calls a random model makes."""

import os
import re
import time
from pathlib import Path

CHATS = [
    {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
    for a in range(4)
    for b in range(4)
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}"
    "{{ c['function']['name'] }}{{ c['function']['arguments'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open_pattern": "[n-z]",
            "close_pattern": "$",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "look", "arguments": {"key": "{content}"}},
            },
        },
        "content": {"close_pattern": "<eos>|$", "content": "text"},
    },
}
"""A turn with a letter from n to z calls `look` with what follows."""


def with_tools(tokenizer):
    """Give a tokenizer of characters a template with tools."""
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    return tokenizer


def look(key: str) -> str:
    """Look something up.

    Args:
        key: What to look up.
    """
    return str(len(key))


async def wait_and_look(key: str) -> str:
    """Look something up, later.

    Args:
        key: What to look up.
    """
    import asyncio

    await asyncio.sleep(0.01)
    return str(len(key))


def lengths(completions, **columns):
    """A reward: the number of messages."""
    return [float(len(c)) for c in completions]


def one(completions, **columns):
    """A reward that is always the same."""
    return [1.0] * len(completions)


def notes(delay=None, owns_reward=True):
    """Return a class of environments whose calls take `delay(key, seed)` seconds."""

    class Notes:
        def reset(self, prompt, seed, **columns) -> str:
            self.seed, self.keys = seed, []
            return f" ({seed % 7})"

        def look(self, key: str) -> str:
            """Look something up.

            Args:
                key: What to look up.
            """
            if delay is not None:
                time.sleep(delay(key, self.seed))
            self.keys.append(key)
            return f"{len(self.keys)}{(self.seed + len(key)) % 10}"

        if owns_reward:

            def get_reward(self) -> float:
                return float(len(self.keys) % 3)

    return Notes


class Numbered(notes()):
    """A class with an import path."""


class Troubled:
    """Does what a model's input makes a tool do."""

    def reset(self, trouble=None, **columns) -> None:
        if trouble == "reset":
            raise RuntimeError("no such game")
        self.trouble = trouble

    def look(self, key: str) -> str:
        """Look something up.

        Args:
            key: What to look up.
        """
        if self.trouble == "raise":
            raise ValueError("not there")
        if self.trouble == "surrogate":
            return "\ud800"
        if self.trouble == "write":  # into the worker's pipe
            from multiprocessing.connection import Connection

            number = Path("/proc/self/cmdline").read_text().split("\0")[-4]
            Connection(int(number)).send_bytes(b'["answer", 1, null, 7, ""]')
            time.sleep(1000)
        if self.trouble == "exit":
            os._exit(3)
        if self.trouble == "hang":
            time.sleep(1000)
        if self.trouble == "slow":
            time.sleep(1.5)
        if self.trouble == "lock":  # holds Python's lock
            re.match("(a*)*b", "a" * 40)
        if self.trouble == "memory":
            self.held = bytearray(100 << 30)
        if self.trouble == "long":
            return "x" * (50 << 20)
        if self.trouble == "picture":
            return [{"type": "image", "image": None}]
        return "1"
