"""Traces of a run on disk: Parquet files that are whole whenever the run is killed."""

import json
import os
import re
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_rlsched.settings import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 2
ABOUT = "about.json"
"""What holds for all rounds of the run."""
TABLES = {
    "rounds": ("round", "version", "clock", "began", "slots", "metrics"),
    "completions": ("round", "request", "uid", "prompt_tokens", "drawn", "reward", "fate"),
    "spans": ("round", "request", "slot", "start", "end", "tokens"),
    "steps": ("round", "engine", "steps", "start", "end", "running", "kv_tokens", "seconds"),
    "intervals": ("round", "lane", "what", "start", "end", "waits_for"),
}
"""Tables, each a folder with files `FIRST-LAST.parquet`, named after rounds; and columns that are
read of each."""
WHOLE = ("rounds",)
"""Small tables, which are never shortened."""
MERGED = 32
"""Files of single rounds that become one file."""
MOST_BYTES = 2**28
"""Size from which on the oldest rounds are deleted."""


class Part(NamedTuple):
    """A file with rows of some rounds."""

    first: int
    last: int
    path: Path


def parts_of(folder: Path) -> list[Part]:
    """Return the files of a table in order, without those that a merged file replaces.

    A kill between a merge and the deletion of what it has merged leaves both.
    """
    names = ((re.fullmatch(r"(\d+)-(\d+)", path.stem), path) for path in folder.glob("*.parquet"))
    found = [Part(int(name[1]), int(name[2]), path) for name, path in names if name]
    whole: list[Part] = []
    for part in sorted(found, key=lambda part: (part.first, -part.last)):
        if not whole or part.last > whole[-1].last:
            whole.append(part)
    return whole


class TraceWriter:
    """Adds rounds to the traces of a run.

    Each file is written under another name and then renamed, so a reader never sees half of one.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def begin(self, number: int, about: Mapping[str, Any]) -> None:
        """Go on before round `number`: delete rows of that round and later."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.rglob("*.tmp"):
            path.unlink()
        for table in TABLES:
            kept = parts_of(self._folder / table)
            for path in (self._folder / table).glob("*.parquet"):
                if path not in {part.path for part in kept}:
                    path.unlink()
            for part in kept:
                if part.last >= number:
                    if part.first < number:
                        rows = pq.ParquetFile(part.path).read()
                        rows = rows.filter(pc.less(rows["round"], number))
                        self.write(table, part.first, number - 1, rows)
                    part.path.unlink()
        text = json.dumps({"format": FORMAT, **about}, indent=1)  # ASCII
        write_whole(self._folder / ABOUT, lambda path: path.write_text(text))

    def add(self, number: int, tables: Mapping[str, "pa.Table"]) -> None:
        """Write the rows of a round, each table with its number as the first column.

        Files of single rounds are merged. Of large tables the oldest rounds are deleted, but never
        the newest file of one.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        for name, table in tables.items():
            if not table.num_rows:
                continue
            numbered = table.add_column(0, "round", [[number] * table.num_rows])
            self.write(name, number, number, numbered)
            single = [part for part in parts_of(self._folder / name) if part.first == part.last]
            if len(single) >= MERGED:
                read = [pq.ParquetFile(part.path).read() for part in single]
                merged = pa.concat_tables(read, promote_options="permissive")
                self.write(name, single[0].first, single[-1].last, merged)
                for part in single:
                    part.path.unlink()
        large = [parts_of(self._folder / name) for name in TABLES if name not in WHOLE]
        sizes = {part: part.path.stat().st_size for parts in large for part in parts}
        total = sum(sizes.values())
        for part in sorted((p for parts in large for p in parts[:-1]), key=lambda p: p.last):
            if total <= self._most_bytes:
                break
            total -= sizes[part]
            part.path.unlink()

    def write(self, name: str, first: int, last: int, table: "pa.Table") -> None:
        """Write the rows of some rounds, which have the number of their round."""
        import pyarrow.parquet as pq

        path = self._folder / name / f"{first:06}-{last:06}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda at: pq.write_table(table, at))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, which replaces the one at `path` once it is whole."""
    unfinished = path.with_name(f".{path.name}.tmp")  # other readers of the folder skip it
    write(unfinished)
    os.replace(unfinished, path)


class Traces:
    """The traces of a run, from its folder or its folder `traces`; each table is read once."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.folder = folder if (folder / ABOUT).is_file() else folder / "traces"
        path = self.folder / ABOUT
        if not path.is_file():
            raise UsageError(
                f"`{folder}` holds no traces. Give the folder of a run with `RolloutLogger`, which "
                "writes them into `traces/`."
            )
        try:
            self.about: dict[str, Any] = json.loads(path.read_bytes())
            version = self.about["format"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"`{path}` is damaged: it is no JSON of a run's traces.") from None
        if version != FORMAT:
            raise UsageError(
                f"`{path}` has the format {version!r}, and this version of lit_rlsched reads "
                f"{FORMAT}. Use the version that wrote it."
            )
        self._tables: dict[str, pa.Table] = {}

    def newest(self, rounds: int) -> "Traces":
        """Return the newest rounds alone: what a run is like now, and not when it began."""
        import pyarrow.compute as pc

        completions, part = self.table("completions"), copy(self)
        known = completions["round"].unique().to_pylist() if completions.num_rows else [0]
        first = sorted(known)[-rounds:][0]
        tables = {name: self.table(name) for name in TABLES}
        part._tables = {
            name: of.filter(pc.greater_equal(of["round"], first)) if of.num_rows else of
            for name, of in tables.items()
        }
        return part

    def table(self, name: str) -> "pa.Table":
        """Return all rows of a table, which may have none, in the order of the rounds."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if name not in self._tables:
            tables = []
            for part in parts_of(self.folder / name):
                try:
                    tables.append(pq.ParquetFile(part.path).read())
                except (pa.ArrowInvalid, OSError) as error:
                    raise UsageError(
                        f"`{part.path}` cannot be read: {error}. Copy it again, or delete it to do "
                        f"without rounds {part.first} to {part.last}."
                    ) from None
            tables = tables or [pa.table({})]
            self._tables[name] = pa.concat_tables(tables, promote_options="permissive")
        return self._tables[name]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table."""
        return self.table(name).to_pylist()

    def check(self) -> None:
        """Refuse tables that have rows and lack a column."""
        for name, columns in TABLES.items():
            table = self.table(name)
            missing = [column for column in columns if column not in table.column_names]
            if table.num_rows and missing:
                raise UsageError(
                    f"`{self.folder / name}` has no column `{missing[0]}`: these are not the "
                    "traces of a run. Copy them again."
                )
