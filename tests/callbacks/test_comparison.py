import csv
from pathlib import Path

import pytest

from lit_rlsched.callbacks.pictures.comparison import compare, comparison, read_run
from lit_rlsched.cli.main import main


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


def test_runs_are_beside_each_other_over_rounds_and_minutes(tmp_path):
    first = make_run(
        tmp_path / "runs/a/version_0",
        [validation(0, 30), a_round(1, 60, 0.1), {"epoch": 0}, a_round(2, 180, 0.2)],
    )
    second = make_run(tmp_path / "b", [a_round(n, 6.0 * n) for n in range(1, 61)])
    figure = comparison({"a/version_0": read_run(first), "b": read_run(second)})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a/version_0", "b"]
    (rounds, minutes), accuracy, length, seconds = zip(
        figure.axes[::2], figure.axes[1::2], strict=True
    )
    assert [*rounds.lines[0].get_xdata()] == [1, 2] and [*rounds.lines[0].get_ydata()] == [0.1, 0.2]
    assert [*minutes.lines[0].get_xdata()] == [1, 3]
    assert [*accuracy[0].lines[0].get_xdata()] == [0] and [*accuracy[1].lines[0].get_xdata()] == [
        0.5
    ]
    assert [*seconds[0].lines[0].get_ydata()] == [120]
    assert [*seconds[0].lines[-1].get_ydata()] == pytest.approx([6.0] * 59)
    assert [*length[0].lines[0].get_ydata()] == [40, 40]
    colours = [
        {line.get_color() for axes in figure.axes for line in axes.lines if of(line)}
        for of in (
            lambda line: line.get_label() == "a/version_0",
            lambda line: line.get_label() == "b",
        )
    ]
    assert all(len(one) == 1 for one in colours) and colours[0] != colours[1]
    shown = compare([first, second], tmp_path / "deep/er/both.png")
    assert shown.read_bytes().startswith(b"\x89PNG")


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


def test_what_is_no_run_is_refused_by_name(tmp_path, capsys):
    run = make_run(tmp_path / "runs/a/version_1", [a_round(1, 1)])
    new = make_run(tmp_path / "new", [validation(0, 5)])
    (tmp_path / "empty").mkdir()
    for folder, why in (
        (tmp_path / "empty", "is no run: it has no `metrics/*/metrics.csv`. Name the folder of"),
        (tmp_path / "nowhere", "is no run"),
        (tmp_path / "runs/a", f"Name one of the runs in it, such as `{run}`."),
        (new, "is a run without a round"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["compare", str(run), str(folder), "--out", str(tmp_path / "x.png")])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.startswith(f"error: `{folder}` ") and why in said
    with pytest.raises(SystemExit):
        main(["compare", str(run), "--out", "x.bmp"])
    assert "`out=x.bmp`: use a name in .png" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_the_command_draws_what_it_is_given(tmp_path, capsys):
    same = [make_run(tmp_path / name / "run", [a_round(1, 1), a_round(2, 2)]) for name in "ab"]
    main(["compare", *map(str, same), "--out", str(tmp_path / "two.svg")])
    assert capsys.readouterr().out == f"The picture of 2 runs is `{tmp_path / 'two.svg'}`.\n"
    assert "<svg" in (tmp_path / "two.svg").read_text()
