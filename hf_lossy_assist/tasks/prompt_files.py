"""Files of prompts in parts, of which any is read by itself, with JSON lines or Parquet: no process holds all rows."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..artifacts.json_io import JSONObject as Row
from ..artifacts.json_io import parse_json
from ..validation import one_line, shown
from .base import require_file
from .prompts import FIELDS, find_text


LEAST, MOST_PARTS = 32, 4096  # rows of a part, unless that makes more parts


@dataclass(frozen=True)
class PromptFile:
    """The rows of a file in parts of `rows`. `begins`: each part's first byte (JSON lines) or row (Parquet)."""

    path: Path
    rows: int
    total: int
    begins: list[int]

    @classmethod
    def open(cls, path: Path, batch_size: int, limit: int | None) -> "PromptFile":
        """Find the parts of a file, whose rows are not held in memory. Raises: `ValueError` or `OSError`, one line."""
        if path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"--prompts {path}: expected JSON lines (.jsonl) or Parquet (.parquet)")
        columnar = require_file(path).suffix == ".parquet"
        try:
            total = pq.ParquetFile(path).metadata.num_rows if columnar else sum(1 for _ in cls._lines(path))
        except pa.ArrowException as error:
            raise ValueError(f"--prompts {path} is not Parquet: {one_line(error)}") from None
        total = total if limit is None else min(total, limit)
        rows = max(LEAST, 8 * batch_size, -(-total // MOST_PARTS))
        if not total:
            raise ValueError(f"--prompts {path} has no rows")
        begins = range(0, total, rows) if columnar else (at for at, _ in islice(cls._lines(path), 0, total, rows))
        return cls(path, rows, total, list(begins))

    @staticmethod
    def _lines(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, each with its first byte."""
        with open(path, "rb") as file:
            file.seek(begin)
            for line in file:
                if line.strip():
                    yield begin, line
                begin += len(line)

    def read(self, number: int) -> list[Row]:
        """Return the rows of part `number`; a row that is no JSON object has an `error`. Rows without an `id` get their number."""
        first, begin = number * self.rows, self.begins[number]
        count = min(self.rows, self.total - first)
        if self.path.suffix == ".parquet":
            rows = self._read_table(begin, count).to_pylist()
        else:
            rows = [
                self._parse(n, line) for n, (_, line) in enumerate(islice(self._lines(self.path, begin), count), first)
            ]
        return [{"id": n} | row for n, row in enumerate(rows, first)]

    def _read_table(self, begin: int, count: int) -> pa.Table:
        file, before, groups, skipped = pq.ParquetFile(self.path), 0, list[int](), 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if before + size > begin and before < begin + count:
                skipped = skipped if groups else begin - before
                groups.append(group)
            before += size
        return file.read_row_groups(groups).slice(skipped, count)

    def _parse(self, number: int, line: bytes) -> Row:
        where = f"{self.path.name}, row {number} (the first is 0)"
        try:
            row = parse_json(line, where)
        except ValueError as error:
            return {"error": one_line(error)}
        if not isinstance(row, dict):
            return {"error": f"{where}: expected a JSON object"}
        if "prompt" not in row and "messages" not in row:
            row["prompt"] = find_text(row, FIELDS)
        return row

    def encode(self, rows: Sequence[Row], columns: Mapping[str, pa.DataType]) -> bytes:
        """Return rows in the file's format. `columns`: those that the file does not have."""
        if self.path.suffix != ".parquet":
            return b"".join(map(_encode_line, rows))
        data, schema = io.BytesIO(), pq.read_schema(self.path)
        schema = schema if "id" in schema.names else schema.append(pa.field("id", pa.int64()))
        table = pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)
        for name, kind in columns.items():
            table = table.append_column(name, pa.array([row.get(name) for row in rows], kind))
        pq.write_table(table, data)
        return data.getvalue()

    def count_errors(self, parts: Iterable[Path]) -> tuple[int, str | None]:
        """Return how many rows of written parts have an error, and the first of them."""
        count, first = 0, None
        for path in parts:
            if path.suffix == ".parquet":
                errors = pq.read_table(path, columns=["error"])["error"].drop_null().to_pylist()
            else:
                with open(path, "rb") as file:
                    errors = [error for line in file if (error := json.loads(line)["error"]) is not None]
            first = next(iter(errors), None) if first is None else first
            count += len(errors)
        return count, first


def _encode_line(row: Row) -> bytes:
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return (json.dumps(row) + "\n").encode()


def make_table(columns: object) -> pa.Table:
    """Return columns by name, of lists or arrays, as a table. Raises: `ValueError` or `TypeError`, one line, for values of several types."""
    if not hasattr(columns, "items"):
        raise TypeError(f"expected a pyarrow.Table or columns by name, got {shown(columns)}")
    found, pandas = {}, hasattr(columns, "iloc")  # whose missing values are NaN, also among texts
    for name, column in columns.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__iter__"):
            raise TypeError(
                f"column {shown(name)}: expected a list or an array with a value for each row, got {shown(column)}"
            )
        try:
            found[name] = pa.array([x.tolist() if hasattr(x, "tolist") else x for x in column], from_pandas=pandas)
        except (pa.ArrowException, UnicodeError) as error:
            raise ValueError(f"column {shown(name)}: {one_line(error, 200)}: pass values of one type") from None
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {shown(lengths)}")
    return pa.table(found)
