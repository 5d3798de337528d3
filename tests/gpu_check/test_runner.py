"""The runner goes on whatever becomes of a check, and its report says what did."""

import json
import math
import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import runner
from benchmarks.gpu_check.checks import CHECKS, MORE_GPUS
from benchmarks.gpu_check.findings import Findings
from benchmarks.gpu_check.runner import Check, exit_code, run_checks
from benchmarks.gpu_check.setting import Setting

TRIVIAL = """
import os, signal, sys, time
from benchmarks.gpu_check.findings import Skip

def passes(setting, found, most=2.0):
    found.record("note", "seen")
    found.at_most("figure", 1.5, most, "ms", "Do this.")

def raises(setting, found):
    found.at_most("figure", 1.5, 2.0)
    raise RuntimeError("it broke")

def exits(setting, found):
    sys.exit(2)

def hangs(setting, found):
    found.at_most("before it hung", 1.0, 2.0)
    time.sleep(600)

def crashes(setting, found):
    found.at_most("before it crashed", 1.0, 2.0)
    os.kill(os.getpid(), signal.SIGSEGV)

def crashes_after(setting, found):
    import atexit
    found.at_most("figure", 1.0, 2.0)
    atexit.register(os.kill, os.getpid(), signal.SIGABRT)

def skips(setting, found):
    raise Skip("there is one GPU")

def rehearses(setting, found):
    found.skip("judged on a GPU only")
    found.at_most("figure", 3.0, setting.pick(1.0, 4.0))

def judges_nothing(setting, found):
    found.record("note", 1)

def complains(setting, found):
    found.at_most("figure", 1.0, 2.0)
    print("CUDA Error: an invalid argument at cumem_allocator.cpp:113", file=sys.stderr)

def leaves_a_process(setting, found):
    import subprocess
    found.at_most("figure", 1.0, 2.0)
    child = subprocess.Popen(["sleep", "600"])
    found.record("left", child.pid)
"""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    (tmp_path / "trivial_checks.py").write_text(TRIVIAL)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root]))
    return Setting("cpu", str(tmp_path / "report"), str(tmp_path / "models"))


def check(name: str, **settings) -> Check:
    arguments = settings.pop("arguments", {})
    settings = {"planned": 1, "limit": 30, **settings}
    return Check(
        name, f"That it {name}.", f"trivial_checks:{name}", arguments=arguments, **settings
    )


def run(setting: Setting, *checks: Check) -> dict[str, runner.Result]:
    results = run_checks(checks, setting, lambda result: None)
    return {result.check.name: result for result in results}


def test_goes_on_after_a_failure_a_hang_and_a_crash(setting):
    began = time.monotonic()
    names = ("raises", "exits", "crashes", "crashes_after", "judges_nothing", "complains")
    results = run(setting, check("hangs", limit=2), *map(check, names), check("passes"))
    assert time.monotonic() - began < 30
    assert {n: r.status for n, r in results.items()} == {
        **dict.fromkeys(("hangs", *names), "failed"),
        "passes": "passed",
    }
    said = {name: result.why for name, result in results.items()}
    assert said["raises"] == "RuntimeError: it broke"
    assert said["exits"] == "SystemExit: 2"
    assert "2 s and was killed" in said["hangs"]
    assert "SIGSEGV, before" in said["crashes"] and "SIGABRT, after" in said["crashes_after"]
    assert "judged nothing" in said["judges_nothing"] and "CUDA Error" in said["complains"]
    assert results["hangs"].findings.figures[0].name == "before it hung"
    assert results["crashes"].findings.figures[0].name == "before it crashed"
    assert exit_code(results.values()) == 1


def test_a_figure_beyond_its_limit_says_what_to_do(setting):
    results = run(setting, check("passes", arguments={"most": 1.0}))
    assert results["passes"].status == "failed"
    assert results["passes"].why == "figure 1.5 ms (at most 1). Do this."


def test_what_cannot_be_tried_or_judged_here_is_skipped(setting):
    results = run(setting, check("skips"), check("rehearses"))
    assert [(r.status, r.why) for r in results.values()] == [
        ("skipped", "there is one GPU"),
        ("skipped", "judged on a GPU only"),
    ]
    assert exit_code(results.values()) == 0


def test_a_rehearsal_that_breaks_a_limit_fails():
    found = Findings(skipped="judged on a GPU only")
    found.at_most("figure", 3.0, 1.0)
    assert runner.judge(found, 0, 10, "")[0] == "failed"


def test_an_error_does_not_hide_the_figure_that_explains_it():
    found = Findings(error="Traceback\nAssertionError: invalid device id")
    found.at_least("GPUs that torch sees", 0, 1, advice="Update the driver.")
    why = runner.judge(found, 1, 10, "")[1]
    assert "Update the driver.; AssertionError: invalid device id" in why


def test_nothing_else_is_tried_after_an_essential_one(setting):
    first = check("raises", essential=True)
    results = run(setting, first, check("passes"))
    assert results["passes"].status == "skipped"
    assert results["passes"].why == "not tried: raises failed"
    assert exit_code(results.values()) == 1


def test_a_process_that_is_left_is_ended(setting):
    results = run(setting, check("leaves_a_process"))
    (pid,) = [f.value for f in results["leaves_a_process"].findings.figures if f.name == "left"]
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_memory_that_stays_in_use_fails_the_check(setting, monkeypatch):
    used = iter([500, *[9000] * 1000])
    monkeypatch.setattr(runner, "gpu_memory", lambda setting: next(used))
    monkeypatch.setattr(runner, "SETTLE", 1.0)
    result = run(setting, check("passes"))["passes"]
    assert result.status == "failed"
    assert "GPU memory left behind 8500 MiB (at most 1,024)" in result.why


def test_nan_is_beyond_every_limit():
    found = Findings()
    found.at_most("a", math.nan, 1.0)
    found.at_least("b", math.nan, 1.0)
    assert [figure.ok for figure in found.figures] == [False, False]
    json.dumps([figure.value for figure in found.figures], allow_nan=False)


def test_the_command(setting, tmp_path, monkeypatch, capsys):
    checks = [check("passes"), check("raises"), check("skips")]
    monkeypatch.setattr(command, "CHECKS", checks)
    out = str(tmp_path / "out")
    assert command.main(["--device", "cpu", "--out", out]) == 1
    (folder,) = (path for path in Path(out).iterdir() if path.name != "models")
    held = json.loads((folder / "report.json").read_text())
    assert [c["status"] for c in held["checks"]] == ["passed", "failed", "skipped"]
    assert held["checks"][0]["figures"][1]["limit"] == "at most 2"
    page = (folder / "report.md").read_text()
    assert "RuntimeError: it broke" in page and "rehearsal on CPU" in page
    printed = capsys.readouterr().out.splitlines()
    assert "1 passed, 1 failed, 1 skipped" in printed[-2] and "report.md" in printed[-2]
    assert "figure 1.5 ms (at most 2)" in printed[0] and "it broke" in printed[1]
    time.sleep(1.0)  # folders are named by the second
    assert command.main(["--device", "cpu", "--out", out, "--only", "passes", "skips"]) == 0
    with pytest.raises(SystemExit, match="no such check"):
        command.main(["--only", "sings"])
    assert command.main(["--list"]) == 0
    assert "That it raises." in capsys.readouterr().out


def test_half_an_hour_on_one_gpu():
    assert {c.name for c in CHECKS} > {*MORE_GPUS}
    alone = [c for c in CHECKS if c.name not in MORE_GPUS]
    assert sum(c.planned for c in alone) <= 33 * 60
    assert all(c.planned < c.limit <= 600 for c in CHECKS)
    assert len({c.name for c in CHECKS}) == len(CHECKS)
    assert [c.name for c in CHECKS if c.essential] == ["environment"]


def test_every_check_has_its_function():
    import ast

    folder = Path(command.__file__).parent
    for listed in CHECKS:
        module, name = listed.function.rpartition(".")[2].split(":")
        tree = ast.parse((folder / f"{module}.py").read_text())
        (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
        assert [a.arg for a in function.args.args] == ["setting", "found", *listed.arguments]
