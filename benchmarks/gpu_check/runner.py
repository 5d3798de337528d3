"""Runs the checks one after the other, each in its own process."""

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
"""Seconds within which a check that ended must have released its GPU memory."""
LEFT_BEHIND = 1024
"""MiB by which GPU memory in use may grow over a check."""
TAIL = 30
"""Lines of a log that a report shows."""
FATAL = ("CUDA Error", "CUDA error", "an illegal memory access")
"""Text in the log of a check that ended normally: vLLM's allocator only prints its errors."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check."""

    name: str
    shows: str
    """What is known once it passes."""
    function: str
    """`module:function`, called in the check's process."""
    planned: float
    """Expected seconds on an H100."""
    limit: float
    """Seconds after which it is killed."""
    arguments: dict[str, Any] = field(default_factory=dict)
    essential: bool = False
    """Whether the remaining checks are skipped if it fails."""


@dataclass(slots=True)
class Result:
    """Result of a check."""

    check: Check
    status: Status
    seconds: float
    findings: Findings
    why: str = ""
    """Reason of a failure or a skip, in a line or two."""
    log: str = ""
    """Path of its output."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as it stands in the report."""
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
    """Run all checks in order.

    Args:
        checks: Checks to run.
        setting: Setting whose `folder` gets a folder for each check.
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
    """Run a check in its own process and judge its findings."""
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
            "A process of this check still runs (`nvidia-smi`), and later checks may run out of "
            "memory. Report it.",
        )
    status, why = judge(found, code, check.limit, log.read_text(errors="replace"))
    return Result(check, status, seconds, found, why, str(log))


def judge(found: Findings, code: int | None, limit: float, log: str) -> tuple[Status, str]:
    """Return whether a check passed, and if not, why.

    Args:
        found: Its findings.
        code: Its exit code; None if it was killed after its time limit.
        limit: Its time limit in seconds.
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
        return "failed", "judged nothing, so its result means nothing. Report it."
    return "passed", ""


def _run(command: list[str], limit: float, output: Any, environment: dict[str, str]) -> int | None:
    """Return the exit code of a process, None after a timeout; its whole group has ended."""
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
    ours = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as the command line does
    return {**ours, **os.environ, **changes}


def _settled(setting: Setting, before: int) -> int:
    """Return MiB of GPU memory in use, once it was released or the time for that is over."""
    end = time.monotonic() + SETTLE
    while (used := gpu_memory(setting) or 0) > before + LEFT_BEHIND and time.monotonic() < end:
        time.sleep(0.5)
    return used


def gpu_memory(setting: Setting) -> int | None:
    """Return MiB in use on all GPUs by the driver; None if the driver does not tell."""
    if not setting.on_gpu:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(int(line) for line in said.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def tail(path: str) -> str:
    """Return the last lines of a log."""
    lines = Path(path).read_text(errors="replace").splitlines() if path else []
    return "\n".join(lines[-TAIL:])


def exit_code(results: Iterable[Result]) -> int:
    """Return 1 if a check failed."""
    return int(any(result.status == "failed" for result in results))
