"""The metrics of a run, read from its folder."""

import csv
from pathlib import Path

import pytest

from lit_rlsched.run.record import read_run
from lit_rlsched.settings import UsageError


def make_run(folder: Path, *files: list[dict]) -> Path:
    for number, rows in enumerate(files):
        path = folder / f"metrics/version_{number}/metrics.csv"
        path.parent.mkdir(parents=True)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", newline="") as text:
            writer = csv.DictWriter(text, columns)
            writer.writeheader()
            writer.writerows(rows)
    return folder


def a_round(number: int, seconds: float, reward: float = 0.5, length: float = 40) -> dict:
    row = {"rollout/round": number, "time/total": seconds, "reward": reward}
    return {**row, "completions/mean_length": length}


def validation(rounds: int, seconds: float, accuracy: float = 0.5) -> dict:
    return {"rollout/round": rounds, "time/total": seconds, "val/accuracy": accuracy}


def test_a_resumed_run_is_one_curve(tmp_path):
    run = make_run(
        tmp_path,
        [validation(0, 5), a_round(1, 10), validation(1, 12), a_round(2, 20), a_round(3, 30)],
        [a_round(2, 21), validation(2, 22), a_round(3, 31)],
        *([a_round(n, 10.0 * n)] for n in range(4, 12)),  # version_10 comes after version_9
    )
    rows = read_run(run)
    rounds = [(row["rollout/round"], row["time/total"]) for row in rows if "reward" in row]
    assert rounds[:3] == [(1, 10), (2, 21), (3, 31)] and [n for n, _ in rounds] == [*range(1, 12)]
    assert [row["rollout/round"] for row in rows if "val/accuracy" in row] == [0, 1, 2]


def test_what_is_no_run_is_refused_by_name(tmp_path):
    run = make_run(tmp_path / "runs/a/version_1", [a_round(1, 1)])
    new = make_run(tmp_path / "new", [validation(0, 5)])
    (tmp_path / "empty").mkdir()
    for folder, why in (
        (tmp_path / "empty", "is no run: it has no `metrics/*/metrics.csv`. Name the folder of"),
        (tmp_path / "nowhere", "is no run"),
        (tmp_path / "runs/a", f"Name one of the runs in it, such as `{run}`."),
        (new, "is a run without a round"),
    ):
        with pytest.raises(UsageError) as error:
            read_run(folder)
        assert str(error.value).startswith(f"`{folder}` ") and why in str(error.value)
