"""vLLM's own server in a process of its own, as the CPU build starts it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


@contextmanager
def served(*args: str, log: Path, cwd: Path | None = None) -> Iterator[str]:
    """Address of a server with these arguments, small enough for a test."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *args]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-num-seqs", "16", "--max-model-len", "512"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, cwd=cwd, start_new_session=True
        )
    try:
        while True:  # pytest's time-out ends a server that never answers
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (URLError, OSError):
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, 9)
        server.wait()
