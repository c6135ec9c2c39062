"""Files of prompts in parts, of which any is read by itself, with JSON lines or Parquet: no process holds all rows."""

import codecs
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..artifacts.hub import fetch_data, is_data
from ..artifacts.json_io import JSONObject as Row
from ..artifacts.json_io import parse_json
from ..validation import one_line, shown
from .base import require_file
from .prompts import FIELD, FIELDS, find_first_turn, find_text


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
        try:
            columns = pq.read_schema(local).names if columnar else []
            total = pq.ParquetFile(local).metadata.num_rows if columnar else sum(1 for _ in cls._lines(local))
        except pa.ArrowException as error:
            raise ValueError(f"--prompts {path} is not Parquet: {one_line(error)}") from None
        except OSError as error:
            raise ValueError(f"--prompts {path} cannot be read: {one_line(error)}") from None
        total = total if limit is None else min(total, limit)
        rows = max(LEAST, 8 * batch_size, -(-total // MOST_PARTS))
        if not total:
            raise ValueError(f"--prompts {path} has no rows")
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

    def read(self, number: int) -> "list[Row] | pa.Table":
        """Return part `number`: of Parquet as a table, else as rows, of which those that are no JSON object have an `error`.

        Rows get their number as `id` and a `prompt`, if they have others of `FIELDS` in their place. Raises: `ValueError`, one line, for a file
        that is damaged, or another one by now.
        """
        first, begin = number * self.rows, self.begins[number]
        count = min(self.rows, self.total - first)
        found: list[Row] | pa.Table
        if self.path.suffix == ".parquet":
            try:
                found = self._read_table(begin, count)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"--prompts {self.path}, rows from {first}: {one_line(error)}") from None
        else:
            lines = islice(self._lines(self.local, begin), count)
            found = [{"id": n} | self._parse(n, line) for n, (_, line) in enumerate(lines, first)]
        if len(found) != count:
            raise ValueError(f"--prompts {self.path} has changed since the job began: start again with another --out")
        return found if isinstance(found, list) else _name_columns(found, first)

    def _read_table(self, begin: int, count: int) -> pa.Table:
        file, before, groups, skipped = pq.ParquetFile(self.local), 0, list[int](), 0
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
            row = parse_json(line if number else line.removeprefix(codecs.BOM_UTF8), where)
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object")
            if not row.get("prompt") and row.get("messages") is None:
                turn = find_first_turn(row, where) if FIELD in row else None
                text = find_text(row, FIELDS) if turn is None else turn[0]
                row |= {} if text is None else {"prompt": text}
        except ValueError as error:
            return {"error": one_line(error)}
        return row

    def encode(self, found: "list[Row] | pa.Table") -> bytes:
        """Return a part in the file's format."""
        if isinstance(found, list):
            return b"".join(map(_encode_line, found))
        data = io.BytesIO()
        pq.write_table(found, data)
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


def _name_columns(table: pa.Table, first: int) -> pa.Table:
    """Return a table with an `id`, from `first` on, and a `prompt`, made of another of `FIELDS` if there is neither that nor `messages`."""
    names = table.column_names
    if "prompt" not in names and "messages" not in names and (fields := [name for name in FIELDS if name in names]):
        texts = [find_text(row, FIELDS) for row in read_rows(table, fields)]
        table = table.append_column("prompt", pa.array(texts, pa.string()))
    return (
        table
        if "id" in names
        else table.append_column("id", pa.array(range(first, first + table.num_rows), pa.int64()))
    )


def read_rows(table: pa.Table, names: Iterable[str]) -> list[Row]:
    """Return the rows of a table with the columns in `names` that it has; a row whose values Python cannot hold has an `error`."""
    table = table.select([name for name in table.column_names if name in set(names)])
    try:
        rows: list[Row] = table.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:  # such as UnicodeDecodeError
        if table.num_rows == 1:
            return [{"error": f"a value cannot be read: {one_line(error)}"}]
        rows = [row for n in range(table.num_rows) for row in read_rows(table.slice(n, 1), names)]
    return rows


def make_table(columns: object) -> pa.Table:
    """Return columns by name, of lists or arrays, as a table. Raises: `ValueError` or `TypeError`, one line, for values of several types."""
    if not hasattr(columns, "items"):
        raise TypeError(f"expected a pyarrow.Table or columns by name, got {shown(columns)}")
    found = dict[str, pa.Array]()
    for name, column in columns.items():
        lines = (
            hasattr(column, "__iter__")
            and getattr(column, "ndim", 1) > 0
            and not isinstance(column, str | bytes | Mapping)
        )
        if not lines or not isinstance(name, str):
            raise TypeError(
                f"column {shown(name)}: expected a name, and a list or an array with a value for each row, got {shown(column)}"
            )
        if name in found:
            raise ValueError(f"there are two columns {shown(name)}: rename or drop one of them")
        try:
            found[name] = _make_array(column)
        except (pa.ArrowException, UnicodeError, OverflowError) as error:
            raise ValueError(
                f"column {shown(name)}: {one_line(error, 200)}: pass values of one of Arrow's types"
            ) from None
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected columns of one length, got {shown(lengths)}")
    return pa.table(found)


def _make_array(column: Any) -> pa.Array:
    """Return a column of NumPy, pandas or Python as Arrow's. Missing values of pandas are NaN, also among texts."""
    pandas = hasattr(column, "isna")
    if getattr(column, "ndim", 0) == 1 and str(getattr(column, "dtype", "")) not in ("", "object"):
        return pa.array(column, from_pandas=pandas)
    values = [x.tolist() if hasattr(x, "tolist") and x.dtype.kind not in "mM" else x for x in column]
    missing = column.isna() if pandas else [False] * len(values)
    return pa.array([None if gone else value for value, gone in zip(values, missing, strict=True)])
