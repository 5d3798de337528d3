import numpy as np
import pytest

from lit_rlsched.benchmark.record import read_recording, record
from lit_rlsched.benchmark.replay import Schedule, least_steps, oracle, replay
from lit_rlsched.benchmark.steps import SHAPES, Shape, learned, table
from lit_rlsched.rollout.types import Completion, Group, Prompt, Sampling


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
    known = Schedule("known", "continuous", "longest_first", oracle)
    assert replay(rounds, known, slots=2).decode_steps == 12
    assert least_steps(rounds, 2) == 12
    assert least_steps(recorded([[9, 3], [4, 4]]), 2) == 9 + 4


def test_a_probe_costs_what_it_delays():
    rounds = recorded([[8, 8, 8, 8]])
    probing = Schedule("probe", "continuous", "longest_first", oracle, probe_tokens=3)
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
