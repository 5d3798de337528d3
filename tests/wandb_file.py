"""Reads back what W&B wrote offline."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
"""Sizes of LevelDB's log format, in which a `.wandb` file is written."""


class OfflineRun:
    """The records of an `offline-run-*` folder."""

    def __init__(self, folder: Path) -> None:
        (path,) = folder.glob("run-*.wandb")
        self.records = [*records(path)]
        self.artifacts = [r.artifact for r in self.records if r.HasField("artifact")]
        self.rows: list[dict[str, Any]] = [
            values(r.history.item) for r in self.records if r.HasField("history")
        ]
        runs = [r.run for r in self.records if r.HasField("run")]
        self.id, self.name, self.tags = runs[-1].run_id, runs[-1].display_name, [*runs[-1].tags]
        self.config, self.summary, self.metrics = {}, {}, {}
        for record in self.records:
            if record.HasField("run"):
                self.config |= values(record.run.config.update)
            elif record.HasField("config"):
                self.config |= values(record.config.update)
            elif record.HasField("summary"):
                self.summary |= values(record.summary.update)
            elif record.HasField("metric"):
                self.metrics[record.metric.name or record.metric.glob_name] = record.metric


def offline_runs(folder: Path) -> list[OfflineRun]:
    """The runs of a `save_dir`, oldest first."""
    import wandb

    wandb.teardown()  # `finish` does not wait until the file is written
    return [OfflineRun(path) for path in sorted(folder.glob("wandb/offline-run-*"))]


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, at, text = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        text += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(text)
            text = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
