import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import torch

from benchmarks import trl as command
from benchmarks.common import Meter, Setting, cpu_seconds
from benchmarks.ours import train
from benchmarks.report import report

MODEL = str(Path(__file__).parents[1] / "examples/countdown/model")


@pytest.mark.slow
def test_both_sides_train_on_as_many_completions(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # what is set in the test is unset after it
    setting = Setting(
        MODEL,
        rounds=1,
        prompts=4,
        generations=4,
        limit=16,
        trl_batch_size=8,
        engine="transformers",
        train_size=20,
    )
    with ThreadPoolExecutor() as threads, torch.random.fork_rng():
        theirs = threads.submit(command.run, "trl", setting, tmp_path / "trl")
        results = {"ours": train(setting, tmp_path / "ours")}
        results["trl"] = theirs.result()
    for side, result in results.items():
        counts = result["counts"]
        assert counts["completions"] == 16
        assert len(result["equal"]) == 1 and 0 <= result["equal"][0] <= 1
        assert 0 < counts["tokens"] <= 16 * 16
        assert 0 <= counts["padding"] < counts["positions"] or counts["skipped"] == 16
        assert [len(laps) for laps in result["laps"].values()] == [1, 1]
        assert all(lap["cpu"] > 0 for laps in result["laps"].values() for lap in laps)
        assert (tmp_path / side / "model" / "model.safetensors").is_file()
    assert results["trl"]["counts"]["updates"] == 2
    assert results["ours"]["counts"]["decode_steps"] <= 16


def fake_run(tokens, cpu):
    names = ["skipped", "decode_steps", "decode_rows", "updates", "completion_padding", "padding"]
    counts = dict.fromkeys(names, 10) | {"completions": 100, "tokens": tokens}
    lap = {"cpu": cpu, "wall": cpu}
    return {
        "counts": counts | {"positions": 2 * tokens, "completion_positions": tokens},
        "laps": {"rollout": [lap], "update": [lap]},
        "rewards": [0.5],
        "equal": [0.5],
        "startup": 1.0,
        "peak_mib": 1.0,
        "held_out": {"val/accuracy": 0.5},
    }


def test_sides_take_turns(tmp_path, monkeypatch, capsys):
    ran = []

    def run(role, setting, folder):
        ran.append((role, setting.seed))
        judged = {"val/accuracy": 0.75}
        names = ("start", "trl-0", "ours-0", "trl-1", "ours-1")
        return dict.fromkeys(names, judged) if role == "evaluate" else fake_run(100, 1.0)

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "check_trl", lambda: "1.16.0")
    out = tmp_path / "raw.json"
    command.main(["--repeats=2", "--seed=3", f"--model={MODEL}", f"--out={out}"])
    assert ran == [("trl", 3), ("ours", 3), ("trl", 4), ("ours", 4), ("evaluate", 3)]
    assert "0.750" in capsys.readouterr().out
    raw = json.loads(out.read_text())
    assert [r["seed"] for r in raw["runs"]["ours"]] == [3, 4]


def test_ratios_are_medians_of_pairs():
    setting = {"trl_backend": "vllm", "trl_batch_size": 32, "held_out": 8}
    pairs = [(1.0, 2.0), (2.0, 1.0), (4.0, 1.0)]
    text = report(
        {
            "runs": {
                "trl": [fake_run(100, trl) for trl, _ in pairs],
                "ours": [fake_run(50, ours) for _, ours in pairs],
            },
            "start": {"val/accuracy": 0.25},
            "setting": setting,
            "versions": {"trl": "1.16.0"},
            "load": [0.5],
        }
    )
    rows = {line[:43].strip(): re.sub("  +", "  ", line[43:].strip()) for line in text.splitlines()}
    assert rows["CPU seconds"] == "4.0 [2.0 to 8.0]  2.0 [2.0 to 4.0]  0.50"
    assert rows["tokens generated"].split() == ["100", "50", "0.50"]
    assert rows["generated tokens per CPU second"].split()[-1] == "1.00"
    assert max(len(line) for line in text.splitlines()) <= 120


def test_children_count(tmp_path):
    before = cpu_seconds()
    script = "print(sum(range(10**7)), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert cpu_seconds() - before >= 0.05  # while it runs
        child.communicate(b"\n")
    assert cpu_seconds() - before >= 0.05  # and after


def test_laps_start_with_the_first_round():
    meter = Meter()
    meter.start()
    meter.lap("rollout")
    begun = meter.startup
    meter.start()
    assert meter.startup == begun
    meter.lap("update")
    assert list(meter.laps) == ["rollout", "update"]


def test_what_cannot_work_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--trl-batch-size=7", f"--model={MODEL}"])
    assert "must divide the 256 completions" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["--model=nowhere"])
    assert "no such folder" in capsys.readouterr().err


def test_a_comparison_without_an_update_is_refused(monkeypatch):
    """With equal rewards one side skips the update, and the other computes one of zeros."""

    def run(role, setting, folder):
        return fake_run(100, 1.0) | {"equal": [1.0 if role == "ours" else 0.5]}

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "check_trl", lambda: "1.16.0")
    with pytest.raises(SystemExit, match=r"ours: the completions of 100% of the prompts had"):
        command.main(["--repeats=1", "--held-out=0", f"--model={MODEL}"])


def test_a_failed_run_says_why(monkeypatch, tmp_path):
    monkeypatch.setitem(command.MODULES, "ours", "nothing")
    with pytest.raises(RuntimeError, match=r"(?s)`ours` failed.*benchmarks\.nothing"):
        command.run("ours", Setting(MODEL), tmp_path / "run")


def test_without_trl(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SystemExit, match=r"lit-rlsched\[dev\]"):
        command.check_trl()
