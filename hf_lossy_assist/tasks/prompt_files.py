"""Files of prompts in parts, of which any is read by itself, with JSON lines or Parquet: no process holds all rows."""

import codecs
import io
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..artifacts.hub import fetch_data, is_data
from ..artifacts.json_io import JSONObject, parse_json
from ..validation import one_line
from .prompts import CONVERSATION, FIELDS, Row, find_first_turn, require_file


LEAST, MOST_PARTS = 32, 4096  # rows of a part, unless that makes more parts


@dataclass(frozen=True)
class PromptFile:
    """The rows of a file in parts of `rows`. `begins`: each part's first byte (JSON lines) or row (Parquet). `columns`: of Parquet.

    `path`: the file, or a dataset's on the Hub with its commit.
    """

    path: Path
    rows: int
    total: int
    begins: list[int]
    columns: list[str]

    @classmethod
    def open(cls, path: Path, batch_size: int, limit: int | None) -> "PromptFile":
        """Find the parts of a file, whose rows are not held in memory. Raises: `ValueError` or `OSError`, one line."""
        if path.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"--prompts {path}: expected JSON lines (.jsonl) or Parquet (.parquet)")
        local, path = fetch_data(path) if is_data(path) else (require_file(path), path)
        columnar = path.suffix == ".parquet"
        columns = pq.read_schema(local).names if columnar else []
        total = pq.read_metadata(local).num_rows if columnar else sum(1 for _ in cls._lines(local))
        total = total if limit is None else min(total, limit)
        if not total:
            raise ValueError(f"--prompts {path} has no rows")
        rows = max(LEAST, 8 * batch_size, -(-total // MOST_PARTS))
        begins = range(0, total, rows) if columnar else (at for at, _ in islice(cls._lines(local), 0, total, rows))
        return cls(path, rows, total, list(begins), columns)

    @property
    def local(self) -> Path:
        """The file on this machine, to which it is downloaded if it is on the Hub."""
        return require_file(self.path)

    @staticmethod
    def _lines(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, each with its first byte."""
        with open(path, "rb") as file:
            file.seek(begin)
            for line in file:
                if line.strip():
                    yield begin, line
                begin += len(line)

    def read(self, index: int) -> "list[JSONObject] | pa.Table":
        """Return a part: of Parquet as a table, else as rows, of which those that are no JSON object have an `error`.

        Rows get their number as `id` and a `prompt`, if they have others of `FIELDS` in their place. Raises: `ValueError`, one line, for a
        file that is another one by now.
        """
        first, begin = index * self.rows, self.begins[index]
        count = min(self.rows, self.total - first)
        part: list[JSONObject] | pa.Table
        if self.path.suffix == ".parquet":
            part = _name_columns(self._read_table(begin, count), first)
        else:
            lines = islice(self._lines(self.local, begin), count)
            part = [{"id": n} | self._parse(n, line) for n, (_, line) in enumerate(lines, first)]
        if len(part) != count:
            raise ValueError(f"--prompts {self.path} has changed since the job began: start again with another --out")
        return part

    def _read_table(self, begin: int, count: int) -> pa.Table:
        file = pq.ParquetFile(self.local)
        ends = list(accumulate(file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)))
        groups = range(len(ends))[bisect_right(ends, begin) : bisect_left(ends, begin + count) + 1]
        skipped = begin - (ends[groups[0] - 1] if groups and groups[0] else 0)
        return file.read_row_groups(list(groups)).slice(skipped, count)

    def _parse(self, row_id: int, line: bytes) -> JSONObject:
        where = f"{self.path.name}, row {row_id} (the first is 0)"
        try:
            values = parse_json(line.removeprefix(codecs.BOM_UTF8), where)
            if not isinstance(values, dict):
                raise ValueError(f"{where}: expected a JSON object")
            if not values.get("prompt") and values.get("messages") is None:
                row = Row(values, where)
                turn = find_first_turn(row) if CONVERSATION in values else None
                text = row.optional(*FIELDS) if turn is None else turn[0]
                values |= {} if text is None else {"prompt": text}
        except ValueError as error:
            return {"error": one_line(error)}
        return values

    def encode(self, rows: "list[JSONObject] | pa.Table") -> bytes:
        """Return a part in the file's format."""
        if isinstance(rows, list):
            return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        data = io.BytesIO()
        pq.write_table(rows, data)
        return data.getvalue()

    def count_errors(self, paths: Iterable[Path]) -> tuple[int, str | None]:
        """Return how many rows of written parts have an error, and the first of them."""
        count, first = 0, None
        for path in paths:
            if path.suffix == ".parquet":
                errors = pq.read_table(path, columns=["error"])["error"].drop_null().to_pylist()
            else:
                with open(path, "rb") as file:
                    errors = [error for line in file if (error := json.loads(line)["error"]) is not None]
            first = next(iter(errors), None) if first is None else first
            count += len(errors)
        return count, first


def _name_columns(table: pa.Table, first: int) -> pa.Table:
    """Return a table with an `id`, from `first` on, and a `prompt`, made of another of `FIELDS` if there is neither that nor `messages`."""
    names = table.column_names
    if "prompt" not in names and "messages" not in names and (fields := [name for name in FIELDS if name in names]):
        texts = [Row(values, "").optional(*FIELDS) for values in read_rows(table, fields)]
        table = table.append_column("prompt", pa.array(texts, pa.string()))
    ids = pa.array(range(first, first + table.num_rows), pa.int64())
    return table if "id" in names else table.append_column("id", ids)


def read_rows(table: pa.Table, names: Iterable[str]) -> list[JSONObject]:
    """Return the rows of a table with the columns in `names` that it has; a row whose values Python cannot hold has an `error`."""
    table = table.select([name for name in table.column_names if name in set(names)])
    try:
        rows: list[JSONObject] = table.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:  # such as UnicodeDecodeError
        if table.num_rows == 1:
            return [{"error": f"a value cannot be read: {one_line(error)}"}]
        rows = [row for n in range(table.num_rows) for row in read_rows(table.slice(n, 1), names)]
    return rows
