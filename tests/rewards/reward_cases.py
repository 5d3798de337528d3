"""Reward functions that behave, and ones that do not, by what the completion says."""

import asyncio
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def misbehave(completions: list[str], **kwargs: Any) -> Any:
    match completions[0]:
        case "raise":
            raise ZeroDivisionError("in the reward")
        case "quit":
            sys.exit("bye")
        case "interrupt":
            raise KeyboardInterrupt
        case "two scores":
            return [1.0, 2.0]
        case "no list":
            return 1.0
        case "text":
            return ["1.0"]
        case "infinite":
            return [float("inf")]
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(1e6)
        case "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit":
            os._exit(1)
        case "exit 0":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "close everything":
            os.closerange(3, 1000)
    return length(completions)


def peculiar(completions: list[str], **kwargs: Any) -> Any:
    answers = {"none": None, "nan": float("nan"), "true": True, "int": 3}
    return (answers.get(text, 0.5) for text in completions)


def noisy(completions: list[str], **kwargs: Any) -> list[float]:
    print("x" * 100_000)
    print("y" * 100_000, file=sys.stderr)
    return [1.0]


def spoil(completions: list[str], **columns: Any) -> list[float]:
    completions[0] = ""
    columns["info"][0].clear()
    return [0.0]


def size_of_info(completions: list[str], info: list[dict], **kwargs: Any) -> list[float]:
    return [float(len(info[0]) + len(completions[0]))]


def tell_arguments(log_extra: Any, log_metric: Any, **keywords: Any) -> list[float]:
    log_extra("keywords", [keywords])
    log_metric("rows", len(keywords["prompts"]))
    return [1.0]


def strict(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
    return [float(answer[0] == completions[0])]


async def judge(completions: list[str], **kwargs: Any) -> Any:
    if completions[0] == "await forever":
        await asyncio.sleep(1e6)
    if completions[0] == "own timeout":
        async with asyncio.timeout(0.01):
            await asyncio.sleep(1)
    await asyncio.sleep(0.01)
    return misbehave(completions)


class Judge:
    """Keeps a client bound to the event loop, as those of HTTP libraries are."""

    loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        Judge.loop = Judge.loop or asyncio.get_running_loop()
        return [float(Judge.loop is asyncio.get_running_loop())]


def start_child(completions: list[str], **kwargs: Any) -> list[float]:
    child = subprocess.Popen(["sleep", "1000"])
    with open(completions[0], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    re.match(r"(a+)+$", "a" * 60 + "b")
    return [0.0]


def heavy_imports(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(any(name in sys.modules for name in ("torch", "lightning", "transformers")))]


class Broken:
    def __reduce__(self) -> Any:
        return (os.open, ("/no/such/file", 0))

    def __call__(self, **kwargs: Any) -> list[float]:
        return [0.0]


class LoadsWhile:
    """Loads for as long as a file is there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def warm_up(self) -> None:
        time.sleep(0.6)
        assert os.path.exists(self.path), "the file is gone"

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return misbehave(completions)


def eat(completions: list[str], **kwargs: Any) -> list[float]:
    """Takes 4 GiB in one of several ways."""
    match completions[0]:
        case "at once":
            bytearray(4 << 30)
        case "bit by bit":
            pieces = []
            for number in range(1 << 26):
                pieces.append(str(number) * 3)
        case "leak":
            global leaked
            leaked = []
            while len(leaked) < 4096:
                leaked.append(bytearray(1 << 20))
        case "in another process":
            code = "b = bytearray(4 << 30)"
            subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    return [float(len(completions[0]))]


def wait_for(completions: list[str], **kwargs: Any) -> list[float]:
    """Says that it runs, then waits for what never comes."""
    if completions[0].startswith("/"):
        Path(completions[0]).touch()
        while True:
            time.sleep(0.01)
    return [float(len(completions[0]))]


def forge(completions: list[str], **kwargs: Any) -> list[float]:
    """Sends what the completion says through the worker's own pipe, where it is a message."""
    if completions[0].startswith("["):
        (pipe,) = [o for o in gc.get_objects() if type(o).__name__ == "Connection"]
        pipe.send_bytes(completions[0].replace("NOW", repr(time.monotonic())).encode())
        time.sleep(100)
    return [float(len(completions[0]))]


class Ends:
    """Ends its process while it is loaded, once a file says how."""

    def __init__(self, path: str) -> None:
        self.path = path

    def warm_up(self) -> None:
        if os.path.exists(self.path):
            number, *once = Path(self.path).read_text().split()
            if once:
                os.unlink(self.path)
            os.kill(os.getpid(), int(number))

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return misbehave(completions)
