import itertools

import numpy as np
import pytest

from benchmarks import bubbles
from benchmarks.bubbles import (
    HEADER,
    METHODS,
    bubble_ratio,
    decode,
    draw_lengths,
    row,
)
from benchmarks.record import read_recording, record
from benchmarks.replay import Schedule, least_steps, replay
from benchmarks.steps import SHAPES, Shape, learned, table
from lit_rlsched.scheduling.recorded_lengths import Oracle
from lit_rlsched.scheduling.round_rule import FullRound
from lit_rlsched.scheduling.sorted_batching import SortedRound
from lit_rlsched.types import Completion, Group, Prompt, Sampling


def recorded(lengths, limit=64):
    """Rounds of groups of two, with the given lengths."""
    return [
        [
            Group(
                f"{r}.{i}",
                Prompt(f"{r}.{i}", "x", (5, 6)),
                Sampling(limit),
                [Completion(c, [7] * n) for c, n in enumerate(lengths[i : i + 2])],
            )
            for i in range(0, len(lengths), 2)
        ]
        for r, lengths in enumerate(lengths)
    ]


def test_steps_by_hand():
    rounds = recorded([[9, 1, 1, 1, 9, 1, 1, 1]])
    assert replay(rounds, Schedule("naive", "rounds"), slots=2).decode_steps == 9 + 1 + 9 + 1
    assert replay(rounds, Schedule("fifo"), slots=2).decode_steps == 3 + 9
    known = Schedule("known", "continuous", "longest_first", Oracle)
    assert replay(rounds, known, slots=2).decode_steps == 12
    assert least_steps(rounds, 2) == 12
    assert least_steps(recorded([[9, 3], [4, 4]]), 2) == 9 + 4


def test_a_probe_costs_what_it_delays():
    rounds = recorded([[8, 8, 8, 8]])
    probing = Schedule("probe", "continuous", "longest_first", Oracle, probe_tokens=3)
    replayed = replay(rounds, probing, slots=2)
    assert replayed.decode_steps == 16  # nothing is drawn twice
    assert replayed.traces[0].pauses == 4


def test_a_shape_keeps_the_ranks_and_has_the_distribution():
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 64, 256).tolist() for _ in range(3)]
    shape = Shape("s", median=100, sigma=1.0, limit=1000, completions=128, slots=(4,))
    rounds = shape.stretch(recorded(lengths))
    assert [len(groups) for groups in rounds] == [64] * 6
    drawn = [len(c.token_ids) for groups in rounds for g in groups for c in g.completions]
    assert np.median(drawn) == pytest.approx(100, rel=0.02)
    assert np.percentile(np.log(drawn), 84) - np.log(100) == pytest.approx(1.0, abs=0.03)
    assert max(drawn) == 1000
    for before, after in zip(
        np.reshape(lengths, (3, 256)), np.reshape(drawn, (3, 256)), strict=True
    ):
        order = np.argsort(after, kind="stable")
        assert (np.diff(before[order]) >= 0).all() or len(set(after)) < 256


def test_a_table_of_every_schedule():
    rng = np.random.default_rng(0)
    rounds = recorded([rng.integers(1, 64, 32).tolist() for _ in range(4)])
    text = table("Test", rounds, slots=4, probe_tokens=[0, 4])
    assert text.count("\n| ") == 1 + 6 + 4 + 1
    assert learned("planned", 4).name in text and "lower bound" in text
    assert len({s.name for s in SHAPES}) == 3


@pytest.mark.slow
def test_a_recording_can_be_read(tmp_path):
    record(
        tmp_path,
        "--trainer.max_epochs=2",
        "--data.engine=TransformersEngine",
        "--data.prompts_per_round=4",
        "--data.max_completion_length=16",
        "--data.train_data.size=20",
    )
    rounds = read_recording(tmp_path)
    assert [len(groups) for groups in rounds] == [4, 4]
    assert all(0 < len(c.token_ids) <= 16 for r in rounds for g in r for c in g.completions)
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("method", "steps", "idle", "useful"),
    [
        # two rounds of two: 3 steps (1 ran on for 2), then 4 (2 ran on for 2)
        (FullRound(2), [3, 4], 4 / 14, 1.0),
        # 3 and 1 are first; 4 has begun after 1, is cut after 2 steps and drawn again, 2 idles 2
        (SortedRound(2, 4, 1, "completion", "on_policy"), [3, 4], 2 / 14, 10 / 12),
        # ... or goes on for the 2 that it lacks, beside 2
        (SortedRound(2, 4, 1, "completion", "partial"), [3, 2], 0.0, 1.0),
        # 1 and 3 end in step 3, and so do groups 0 and 1 only when 4 does too
        (SortedRound(1, 2, 2, "group", "partial"), [3, 2], 0.0, 1.0),
    ],
)
def test_a_pool_by_hand(method, steps, idle, useful):
    lengths = [[3, 1], [4, 2]] if getattr(method, "unit", "") == "group" else [[3], [1], [4], [2]]
    drained = decode(lengths, method, 2, step_time_base=1.0, per_running=0, per_kv_token=0)
    assert [trace.decode_steps for trace in drained.rounds] == steps
    assert bubble_ratio(drained.rounds) == drained.metrics["pool/bubble_ratio"] == idle
    assert bubble_ratio(drained.rounds[:-1]) == (2 / 6 if isinstance(method, FullRound) else 0)
    assert drained.metrics["pool/useful_token_share"] == pytest.approx(useful)
    assert drained.useful == pytest.approx(10)
    assert drained.seconds == drained.decode_steps == sum(steps)


def test_a_row_by_hand():
    plain = decode([[3], [1], [4], [2]], FullRound(2), 2, per_running=0, per_kv_token=0)
    on_policy = SortedRound(2, 4, 1, "completion")
    drained = decode([[3], [1], [4], [2]], on_policy, 2, per_running=0, per_kv_token=0)
    cells = row("x", 2, [drained], [plain]).strip("| ").split(" | ")
    figures = ["14.29%", "25.0%", "57%", "83.3%", "0", "0%", "0%", "0%", "7", "+0.0%"]
    assert cells == ["2", "x", *figures]
    assert len(cells) == len(HEADER)


def test_the_table_of_bubbles(monkeypatch, capsys):
    for name, value in (("PROMPTS", 32), ("UPDATE", 8), ("LIMIT", 64)):
        monkeypatch.setattr(bubbles, name, value)
    argv = ["bubbles", "--pools", "2", "--slots", "4", "--median", "20", "--sigma", "1"]
    monkeypatch.setattr("sys.argv", argv)
    bubbles.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("2 pools of 32 completions; mean ")
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    names = [method.name for method in METHODS]
    recommended = {(row[0], row[1]): row[2:] for row in cells[1:9]}
    assert list(recommended) == list(itertools.product(["5%", "3%"], names[2:]))
    for (target, _), (by_pool, median, ratio, _, _) in recommended.items():
        assert int(median) == min(map(int, by_pool.split(", ")))  # the lower one of two
        assert float(ratio.strip("%")) <= int(target.strip("%"))
    assert cells[9] == HEADER
    at = {row[1]: dict(zip(HEADER, row, strict=True)) for row in cells[10:]}
    assert list(at) == names
    assert at["synchronous"]["tokens/s"] == "+0.0%"
    for name, figures in at.items():
        assert (figures["pauses"] != "0") == ("turns" in name)
        assert (figures["useful tokens"] == "100.0%") == ("on-policy" not in name)
        assert (figures["after updates"] != "0%") == ("partial" in name)
        assert (figures["stale tokens"] != "0%") == ("partial" in name)
        if "synchronous" not in name:  # all that idles, idles in the last round
            last = [
                float(figures[n].strip("%")) for n in ("in the last round", "its share of steps")
            ]
            assert last[0] * last[1] / 100 == pytest.approx(
                float(figures["bubble ratio"].strip("%")), rel=0.05
            )


def test_the_paper_says_how_long_its_completions_are():
    lengths = np.concatenate([draw_lengths(seed, 1200, 1.1) for seed in range(8)])
    assert (lengths <= 3000).mean() == pytest.approx(0.80, abs=0.02)
    assert (lengths == 8192).mean() == pytest.approx(0.05, abs=0.015)
