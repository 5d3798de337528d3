import os
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lit_rlsched.scheduling import trace_files
from lit_rlsched.scheduling.trace import RolloutTrace, Step
from lit_rlsched.scheduling.trace_files import MERGED, TABLES, Traces, TraceWriter
from lit_rlsched.settings import UsageError


def tables_of(number: int) -> dict[str, pa.Table]:
    """Rows of a round; those of some rounds have a table or a column less."""
    rows = {"value": [number * 10 + i for i in range(1 + number % 3)]}
    tables = {"spans": pa.table(rows), "rounds": pa.table({"version": [number]})}
    if number % 4 == 0:
        tables["intervals"] = pa.table({"start": [number], "more": [str(number)]})
    return tables


def expected(rounds) -> dict[str, list[dict]]:
    rows: dict[str, list[dict]] = {name: [] for name in TABLES}
    for number in rounds:
        for name, table in tables_of(number).items():
            rows[name] += [{"round": number, **row} for row in table.to_pylist()]
    return rows


def read(folder: Path) -> dict[str, list[dict]]:
    traces = Traces(folder)
    return {name: traces.rows(name) for name in TABLES}


class Killed(BaseException):
    pass


def test_rounds_come_back_in_order_however_many_are_merged(tmp_path):
    writer = TraceWriter(tmp_path / "traces")
    writer.begin(1, {"model": "m"})
    for number in range(1, 3 * MERGED + 5):
        writer.add(number, tables_of(number))
        if number % 7 == 0 or number > 3 * MERGED:
            assert read(tmp_path) == expected(range(1, number + 1))
    assert len([*(tmp_path / "traces").rglob("*.parquet")]) < 3 * (MERGED + 4)
    assert Traces(tmp_path).about["model"] == "m" == Traces(tmp_path / "traces").about["model"]


@pytest.mark.mostly_slow("0", "3", "7")
@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_write_loses_no_earlier_round_and_a_resume_goes_on(
    tmp_path, monkeypatch, seed
):
    """Killed before or after any rename or deletion, and resumed from any earlier round."""
    chance, folder = random.Random(seed), tmp_path / "traces"
    monkeypatch.setattr(trace_files, "MERGED", 5)
    replace, unlink, left = os.replace, Path.unlink, [0]

    def counted(operation):
        def run(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and chance.random() < 0.5:
                raise Killed
            operation(*args, **kwargs)
            if left[0] == 0:
                raise Killed

        return run

    monkeypatch.setattr(trace_files.os, "replace", counted(replace))
    monkeypatch.setattr(Path, "unlink", counted(unlink))
    done, number = 0, 1
    for _ in range(40):
        left[0], done = chance.randint(1, 60), number - 1
        try:
            writer = TraceWriter(folder)
            writer.begin(number, {})
            while True:
                writer.add(number, tables_of(number))
                done, number = number, number + 1
        except Killed:
            pass
        left[0] = 0
        if (folder / "about.json").exists():
            found = read(folder)
            for name, rows in expected(range(1, done + 1)).items():
                assert [row for row in found[name] if row["round"] <= done] == rows
        number = chance.randint(1, done + 1)
    left[0] = 0
    TraceWriter(folder).begin(number, {})
    assert read(folder) == expected(range(1, number))
    assert not [*folder.rglob("*.tmp")]


def test_the_oldest_rounds_are_deleted_first(tmp_path):
    whole = TraceWriter(tmp_path / "whole")
    small = TraceWriter(tmp_path / "small", most_bytes=20_000)
    for writer in (whole, small):
        writer.begin(1, {})
        for number in range(1, 200):
            writer.add(number, tables_of(number))
    size = sum(path.stat().st_size for path in (tmp_path / "small" / "spans").iterdir())
    assert size < 40_000
    kept = sorted({row["round"] for row in Traces(tmp_path / "small").rows("spans")})
    assert kept[0] > 1 and kept == [*range(kept[0], 200)]
    for folder in ("small", "whole"):
        assert len(Traces(tmp_path / folder).rows("rounds")) == 199
    assert len({row["round"] for row in Traces(tmp_path / "whole").rows("spans")}) == 199


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"holds no traces\. Give the folder of a run"):
        Traces(tmp_path)
    writer = TraceWriter(tmp_path / "traces")
    writer.begin(1, {})
    writer.add(1, tables_of(1))
    path = tmp_path / "traces" / "spans" / "000001-000001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"000001-000001.parquet` cannot be read: .* rounds 1 to"):
        Traces(tmp_path).rows("spans")
    shutil.copy(__file__, path)
    with pytest.raises(UsageError, match="cannot be read"):
        Traces(tmp_path).rows("spans")
    for text, why in (("{", "damaged"), ("[1]", "damaged"), ('{"format": 9}', "format 9")):
        (tmp_path / "traces" / "about.json").write_text(text)
        with pytest.raises(UsageError, match=why):
            Traces(tmp_path)


@pytest.mark.parametrize("engines", [1, 2])
def test_windows_are_sums_over_the_steps_of_an_engine(engines):
    trace, chance = RolloutTrace(4 * engines, engines=engines), np.random.default_rng(engines)
    now = [0.0] * engines
    for turn in range(50):
        steps = {}
        for engine in range(engines):
            if turn and chance.random() < 0.2:
                continue
            start = now[engine] + 0.5
            now[engine] = start + 1 + chance.random()
            steps[engine] = Step(start, now[engine], 2, int(chance.integers(99)), prefill_tokens=3)
            if not turn:
                steps[engine].admitted = [f"{engine}/0"]
        if steps:
            trace.take_turn(steps)
    columns = {name: np.array(column) for name, column in trace.steps.items()}
    real = columns["decode_steps"] > 0
    for most in (1, 7, 1000):
        windows = trace.windows(most)
        assert max(np.bincount(windows["engine"])) <= most
        for name in ("kv_tokens", "prefill_tokens", "decode_steps"):
            assert windows[name].sum() == columns[name][real].sum()
        assert windows["steps"].sum() == real.sum()
        assert windows["seconds"].sum() == pytest.approx(
            (columns["end"] - columns["start"])[real].sum()
        )
        assert (windows["end"] - windows["start"] >= windows["seconds"] - 1e-9).all()
    assert RolloutTrace(4).windows()["seconds"].size == 0
