"""The composition matrix: which combinations are run, and how both kinds of figures are shown."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.matrix.main import fastest, grid, options_of, picture, table, useful
from lit_rlsched.callbacks import AheadRollout, DownSampling, DrainFilling, MicroGroupSampling
from lit_rlsched.callbacks.candidates import PLAIN, written

A, B, C = (AheadRollout, {}), (DownSampling, {"keep": 2}), (DrainFilling, {})
SLOTS = (MicroGroupSampling, {"order": "fifo"})


def row(seconds, *options, stale=0.0):
    outcome = SimpleNamespace(seconds=seconds, stale_share=stale, length_bias=1.0, peak_kv=1)
    schedule = SimpleNamespace(selection="some" if B in options else None)
    of = SimpleNamespace(options=options)
    return SimpleNamespace(
        name=" + ".join(map(written, options)) or PLAIN, schedule=schedule, outcome=outcome, of=of
    )


ROWS = [
    row(10, stale=0),
    row(8, A),
    row(7, B),
    row(10, C),
    row(6, A, B),
    row(7.99, A, C),  # drain filling adds nothing
    row(5, A, SLOTS),
    row(6.5, SLOTS),
    row(5.5, A, B, C),
]


@pytest.mark.parametrize(("number", "wanted"), [(1, [5.5]), (2, [5.5, 8]), (9, [5.5, 6, 7, 8])])
def test_each_callback_of_a_useful_combination_pays(number, wanted):
    rows = [*ROWS, row(6.9, B, C)]
    assert [each.outcome.seconds for each in useful(rows, number)] == wanted


def test_pairs_are_at_the_crossing_of_their_callbacks():
    names, fast = grid(ROWS, plain=10)
    assert names == [*map(written, (A, B, C, SLOTS))]
    assert fast[0, 1] == fast[1, 0] == pytest.approx(10 / 6)
    assert fast[0, 0] == 10 / 8 and fast[2, 2] == 1
    assert np.isnan(fast[1, 2]) and np.array_equal(fast, fast.T, equal_nan=True)


def test_both_kinds_of_figures_are_shown(tmp_path):
    real = {
        PLAIN: {"seconds": 12.0, "length_bias": 1.0, "accuracy": 0.5, "greedy": 0.6},
        ROWS[4].name: {"seconds": 8.0, "length_bias": 0.9, "accuracy": 0.4, "greedy": 0.5},
    }
    for of in real.values():
        of |= {"slot_steps": 1000.0, "idle_share": 0.25, "staleness": 0.0}
    said = table(real, {each.name: each.outcome.seconds for each in ROWS})
    assert (
        f"| {ROWS[4].name} | 6.0 | 8.0 | 1.50 | 1,000 | 25% | 0.90 | 0.00 | 0.40 (0.50) |" in said
    )
    picture(ROWS, real, plain=10).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000
    assert fastest(ROWS, 2, plain=10, number=1).splitlines() == [
        "3 of 2 callbacks; times as fast:",
        f" 2.00  {ROWS[6].name}",
    ]
    assert options_of(ROWS[0]) == ()
