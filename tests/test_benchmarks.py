"""The benchmarks' runner, their table and their files of results."""

import ast
import csv
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import counts, learning, parallelism, results
from benchmarks.registry import BENCHMARKS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_module_with_a_main_is_listed(capsys):
    files = {name: b.module or f"benchmarks.{name}" for name, b in BENCHMARKS.items()}
    mains = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    }
    assert mains - {"benchmarks.__main__", "benchmarks.gpu_check.child"} == set(files.values())
    assert runner.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *BENCHMARKS]
    assert all(b.shows in "\n".join(lines) and b.simulated for b in BENCHMARKS.values())


def test_what_takes_long_can_be_resumed():
    assert all(b.resumes for b in BENCHMARKS.values() if b.minutes > 40)
    assert any(b.minutes > 40 for b in BENCHMARKS.values())


def test_a_run_appends_its_figures(folder, monkeypatch, capsys):
    monkeypatch.setattr(parallelism, "MEDIANS", [500] * 3)
    assert runner.main(["run", "parallelism"]) == 0
    once = read(folder / "parallelism.csv")
    assert [r["figure"] for r in once[:3]] == ["size", "preemptions", "preemptions with 1"]
    assert len(once) == 3 * 3 and all(set(r) == set(results.COLUMNS) for r in once)
    assert {r["commit"] for r in once} == {results.commit()}
    assert "cores" in once[0]["cpu"] and once[0]["arguments"] == "{}"
    assert runner.main(["run", "parallelism"]) == 0
    assert read(folder / "parallelism.csv")[: len(once)] == once
    assert len(read(folder / "parallelism.csv")) == 2 * len(once)
    assert "parallelism.csv" in capsys.readouterr().err


def test_defaults_and_seeds_are_arguments_too(folder):
    parser = results.parser("x", "Says something.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    with results.recording("x"):
        results.parse(parser, [])
        results.add("row", {"figure": 0.5})
    (row,) = read(folder / "x.csv")
    assert json.loads(row["arguments"]) == {"seeds": [0, 1]}
    assert (row["row"], row["figure"], row["value"]) == ("row", "figure", "0.5")
    results.add("row", {"figure": 1.0})  # nobody records
    assert len(read(folder / "x.csv")) == 1


@pytest.mark.parametrize(("arguments", "said"), [(["run", "nothing"], "steps"), ([], "usage")])
def test_what_is_not_there_is_refused(folder, capsys, arguments, said):
    assert runner.main(arguments) == 2
    assert said in "".join(capsys.readouterr())
    assert not folder.exists()


def test_a_run_is_not_repeated_on_the_same_commit(tmp_path, monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(command)
        if len(ran) == 1:
            raise subprocess.CalledProcessError(1, command)
        (root,) = (a.partition("=")[2] for a in command if "default_root_dir" in a)
        (metrics := Path(root, "metrics/version_0")).mkdir(parents=True)
        equal = 1.0 if "--a=0" in command else 0.5
        (metrics / "metrics.csv").write_text(f"step,frac_reward_zero_std\n0,{equal}\n")

    monkeypatch.setattr(learning.subprocess, "run", run)
    monkeypatch.setattr(results, "commit", lambda: "abc")
    with pytest.raises(subprocess.CalledProcessError):
        learning.train("v", ["--a=1"], 0, 2, tmp_path)
    folder = learning.train("v", ["--a=1"], 0, 2, tmp_path)
    assert len(ran) == 2, "what did not come to its end is run again"
    assert learning.train("v", ["--a=1"], 0, 2, tmp_path) == folder
    assert len(ran) == 2
    learning.train("v", ["--a=2"], 0, 2, tmp_path)
    assert len(ran) == 3, "other arguments"
    monkeypatch.setattr(results, "commit", lambda: "abd")
    assert learning.train("v", ["--a=2"], 0, 2, tmp_path) != folder
    assert len(ran) == 4, "another commit"
    with pytest.raises(SystemExit, match="completions of 100% of the prompts had the same reward"):
        learning.train("v", ["--a=0"], 0, 2, tmp_path)


def test_nothing_is_counted_worse_than_recorded(capsys):
    assert counts.main(["--parts", "schedules", "update", "head"]) == 0, capsys.readouterr().out


def test_a_worse_count_is_named(tmp_path, monkeypatch, capsys):
    now = {"a": counts.Count(10), "b": counts.Count(101, 0.02), "c": counts.Count(9)}
    now["d"] = counts.Count(50, depends=("python",))
    monkeypatch.setattr(counts, "RECORDED", tmp_path / "counts.json")
    monkeypatch.setattr(counts, "PARTS", {"made up": lambda: dict(now)})
    assert counts.main([]) == 1, "nothing is recorded"
    assert counts.main(["--record"]) == 0 == counts.main([])
    now["b"] = counts.Count(103, 0.02)
    assert counts.main([]) == 0, "within its tolerance"
    now |= {"a": counts.Count(11), "c": counts.Count(8)}
    capsys.readouterr()
    assert counts.main([]) == 1
    out = capsys.readouterr().out
    assert "a: 11 (WORSE: 10 was recorded)" in out and "c: 8 (better: 9 was recorded" in out
    now["a"] = counts.Count(10)
    monkeypatch.setattr(counts, "version", lambda name: "4.0")
    now["d"] = counts.Count(99, depends=("python",))
    assert counts.main([]) == 0
    assert "d: 99 (left out: recorded with python 3." in capsys.readouterr().out


def test_what_runs_logged_is_read_and_written_down(tmp_path, folder, monkeypatch, capsys):
    metrics = tmp_path / "run" / "metrics" / "version_0" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    rounds = [f"rollout/{name}" for name in learning.TOTALS]
    once = ["completions/mean_length", "batch/completions", "pool/trained_over_drawn_length"]
    columns = ["step", "val/accuracy", *rounds, *once, "seconds", "cpu_seconds"]
    with metrics.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for step in range(11):
            if step:
                writer.writerow({"step": step, **dict.fromkeys([*rounds, *once], 100.0)})
                writer.writerow({"step": step, "seconds": step, "cpu_seconds": step})
            if step % 5 == 0:
                writer.writerow({"step": step, "val/accuracy": step / 10})
    ended = {"learning": "1000.0", "selection": "10.0", "rollpacker": "10.0"}
    spent = {"learning": "slot_steps", "selection": "cpu_seconds", "rollpacker": "seconds"}
    names = {"learning": "synchronous", "selection": "full", "rollpacker": "synchronous"}
    for name, variant in names.items():
        module = runner.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "train", lambda *_: tmp_path / "run")
        arguments = ["--seeds", "0", "1", "--variants", variant, f"--out={tmp_path}"]
        assert runner.main(["run", name, *arguments]) == 0
        rows = read(folder / f"{name}.csv")
        assert {r["row"] for r in rows} == {f"{variant}, seed 0", f"{variant}, seed 1"}
        values = {r["figure"]: r["value"] for r in rows}
        assert (values["accuracy"], values[spent[name]]) == ("1.0", ended[name])
        assert json.loads(rows[0]["arguments"])["seeds"] == [0, 1]
    assert capsys.readouterr().out.count("1.00 / 1.00") == 3
