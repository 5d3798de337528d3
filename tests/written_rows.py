"""The same rows in every form in which a user may give them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet


def written(tmp_path: Path, kind: str, rows: list[dict[str, Any]]) -> Any:
    """Return rows as what `train_data` takes."""
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":  # lines may be empty
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    elif kind == "saved splits":
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))
    elif kind == "dataset":
        return datasets.Dataset.from_list(rows)
    elif kind == "selected":
        return datasets.Dataset.from_list(rows[::-1]).select(range(len(rows) - 1, -1, -1))
    else:
        return rows
    return str(path)
