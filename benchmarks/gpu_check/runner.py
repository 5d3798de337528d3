"""Runs checks one after the other, each in a process of its own, whatever becomes of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.setting import Setting

Status = Literal["passed", "failed", "skipped"]
SETTLE = 20.0
"""Seconds in which a check that has ended must have given its GPU memory back."""
LEFT_BEHIND = 1024
"""MiB that may be more in use after a check than before it."""
TAIL = 30
"""Lines of a log that a report shows."""
FATAL = ("CUDA Error", "CUDA error", "an illegal memory access")
"""In the log of a check that came to its end all the same: vLLM's allocator prints its errors."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something to see."""

    name: str
    shows: str
    """What is known once it has passed."""
    function: str
    """`module:function`, called in the check's process."""
    planned: float
    """Seconds that it should take on an H100."""
    limit: float
    """Seconds after which it is killed."""
    arguments: dict[str, Any] = field(default_factory=dict)
    essential: bool = False
    """Whether nothing else is tried once it has failed."""


@dataclass(slots=True)
class Result:
    """What became of a check."""

    check: Check
    status: Status
    seconds: float
    findings: Findings
    why: str = ""
    """Of a failure or a skip, in a line or two."""
    log: str = ""
    """Path of its output."""

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        figures = [asdict(figure) for figure in self.findings.figures]
        about = {"name": self.check.name, "shows": self.check.shows, "status": self.status}
        return {
            **about,
            "why": self.why,
            "seconds": round(self.seconds, 1),
            "limit_seconds": self.check.limit,
            "figures": figures,
            "error": self.findings.error,
            "log": self.log,
        }


def run_checks(
    checks: Sequence[Check], setting: Setting, done: Callable[[Result], None]
) -> list[Result]:
    """Run all of them, in order.

    Args:
        checks: What to run.
        setting: Its `folder` is where each check gets one of its own.
        done: Called after each check.
    """
    results: list[Result] = []
    stopped = ""
    for check in checks:
        if stopped:
            result = Result(check, "skipped", 0.0, Findings(), f"not tried: {stopped} failed")
        else:
            result = run_check(check, setting)
            if check.essential and result.status == "failed":
                stopped = check.name
        results.append(result)
        done(result)
    return results


def run_check(check: Check, setting: Setting) -> Result:
    """Run one in a process of its own and judge what it leaves."""
    folder = Path(setting.folder) / check.name
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "findings.json", folder / "log.txt"
    memory = gpu_memory(setting)
    command = [sys.executable, "-m", "benchmarks.gpu_check.child", check.function]
    own = replace(setting, folder=str(folder))
    command += [json.dumps(check.arguments), json.dumps(asdict(own)), str(path)]
    began = time.monotonic()
    with log.open("w") as output:
        code = _run(command, check.limit, output, _environment(setting))
    seconds = time.monotonic() - began
    found = Findings.read(path)
    if memory is not None:
        found.at_most(
            "GPU memory left behind",
            _settled(setting, memory) - memory,
            LEFT_BEHIND,
            "MiB",
            "Something of this check still runs (`nvidia-smi`); later checks may run out of memory "
            "for it. Report it.",
        )
    status, why = judge(found, code, check.limit, log.read_text(errors="replace"))
    return Result(check, status, seconds, found, why, str(log))


def judge(found: Findings, code: int | None, limit: float, log: str) -> tuple[Status, str]:
    """Whether a check has passed, and why not.

    Args:
        found: What it has left.
        code: Its exit code; `None` where it was killed for its time.
        limit: Seconds it had.
        log: Its output.
    """
    failed = [figure for figure in found.figures if figure.ok is False]
    if code is None:
        return "failed", f"did not end within {limit:.0f} s and was killed. Report the log."
    if code < 0 or (code > 0 and not found.error):
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        when = "after it was done" if found.done else "before it was done"
        return "failed", f"ended by {how}, {when}. Report the log."
    why = [f"{f}. {f.advice or 'Report it.'}" for f in failed]
    if found.error:
        why.append(found.error.strip().splitlines()[-1])
    if why:
        return "failed", "; ".join(why)
    if said := next((line for line in log.splitlines() if any(f in line for f in FATAL)), None):
        return "failed", f"its output says: {said.strip()[:200]}. Report the log."
    if found.skipped:
        return "skipped", found.skipped
    if all(figure.ok is None for figure in found.figures):
        return "failed", "has judged nothing, so that it says nothing. Report it."
    return "passed", ""


def _run(command: list[str], limit: float, output: Any, environment: dict[str, str]) -> int | None:
    """Exit code of a process; `None` where it took too long. Nothing of its group is left."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(setting: Setting) -> dict[str, str]:
    changes = {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    if not setting.on_gpu:
        changes["CUDA_VISIBLE_DEVICES"] = ""
    ours = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as the command line
    return {**ours, **os.environ, **changes}


def _settled(setting: Setting, before: int) -> int:
    """MiB of GPU memory in use, once it is back or is not going to be."""
    end = time.monotonic() + SETTLE
    while (used := gpu_memory(setting) or 0) > before + LEFT_BEHIND and time.monotonic() < end:
        time.sleep(0.5)
    return used


def gpu_memory(setting: Setting) -> int | None:
    """MiB in use on all GPUs, by the driver; `None` where nobody says."""
    if not setting.on_gpu:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(int(line) for line in said.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def tail(path: str) -> str:
    """The last lines of a log."""
    lines = Path(path).read_text(errors="replace").splitlines() if path else []
    return "\n".join(lines[-TAIL:])


def exit_code(results: Iterable[Result]) -> int:
    """1 where something has failed."""
    return int(any(result.status == "failed" for result in results))
