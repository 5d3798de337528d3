"""Files of single rounds in the folder of a run."""

from pathlib import Path

from lit_rlsched.callbacks.completions_table import drop_rows
from lit_rlsched.training.round import Round


def save_trace(round: Round, folder: Path) -> None:
    """Write the tables of a round's trace; a round that was resumed has none."""
    import pyarrow.parquet as pq

    if round.trace is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in round.trace.tables().items():
        pq.write_table(table, folder / f"round_{round.number:05}_{name}.parquet")


def drop_rounds(folder: Path, number: int) -> None:
    """Delete what is there of round `number` and later: of another run, or drawn once more."""
    folder.mkdir(parents=True, exist_ok=True)
    drop_rows(folder / "completions.jsonl", number)
    for path in (folder / "traces").glob("round_*.parquet"):
        if int(path.stem.split("_")[1]) >= number:
            path.unlink()
