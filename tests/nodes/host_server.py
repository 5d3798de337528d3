"""Runs ranks on a host, each a fork of this process, which has done the imports.

A line of stdin is a rank as JSON: `folder`, `run` (as in `ranks/ranked_run.py`), `env` and `log`.
The answer is its process number. When it has ended, the file `LOG.code` has its exit code.
"""

import json
import os
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "ranks")]

import ranked_run  # noqa: E402
import torch  # noqa: E402


def rank(given):
    """Be one rank."""
    os.setsid()
    with open(given["log"], "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    torch.set_num_threads(1)
    os.environ |= given["env"]
    Path(given["folder"], given["run"]["name"]).mkdir(parents=True, exist_ok=True)
    ranked_run.ended_by(lambda: ranked_run.run(given["folder"], **given["run"]))


def wait(pid, path):
    """Write the exit code of a process."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(f"{path}.new").write_text(str(code))
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        given = json.loads(line)
        if not (pid := os.fork()):
            rank(given)
        threading.Thread(target=wait, args=(pid, f"{given['log']}.code"), daemon=True).start()
        print(pid, flush=True)
