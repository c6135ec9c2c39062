"""Rows of prompts and problems in files, and the prompts in them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..artifacts.files import JSONObject, parse_json, read_lines
from ..artifacts.hub import fetch_data, is_data
from ..validation import MOST_NEW_TOKENS, check_int, is_int, nearest, one_line, require, shown


FIELDS = ("prompt", "question", "turns")  # GSM8K has `question`, Spec-Bench `turns`
CONTINUATIONS = ("continuation", "answer", "reference")  # GSM8K has `answer`, Spec-Bench `reference`
PEOPLE, MODELS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")
CONVERSATION = "conversations"  # the field of ShareGPT's rows
# SPEED-Bench's, in place of prompts of other data sets
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
# Minimum and maximum of the limits of one text.
LIMITS = {
    "max_new_tokens": (1, MOST_NEW_TOKENS),
    "min_new_tokens": (0, MOST_NEW_TOKENS),
    "stop_strings": (0, 0),
    "seed": (0, 2**63 - 1),
}
LEAST, MOST_PARTS = 32, 4096  # rows of a part, unless that makes more parts


class Row(NamedTuple):
    """A JSON object with its position for error messages."""

    values: dict[str, object]
    where: str

    def text(self, *names: str) -> str:
        """Return the text (or number) under the first of `names` that has one. Raises: `ValueError` with file and line."""
        text = self.optional(*names)
        if text is None:
            fields = one_line(", ".join(self.values)) or "(none)"
            raise ValueError(
                f"{self.where}: expected a text under {' or '.join(map(repr, names))}, got the fields {fields}"
            )
        return text

    def optional(self, *names: str, numbers: bool = True) -> str | None:
        """Return the first text under one of these names, or None. A list counts by its first entry, as in Spec-Bench's `turns`."""
        for name in names:
            value = self.values.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if numbers and isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)
            if isinstance(value, str) and value.strip():
                return value
        return None


class PromptText(NamedTuple):
    """A prompt and, if there is one, its original continuation by a person; `limits`: of the text to write, and its hints."""

    prompt: str
    continuation: str | None = None
    limits: dict[str, object] | None = None


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of a file, one by one: JSON lines or a JSON array, Parquet, or a .txt with a prompt per line.

    Raises: `FileNotFoundError`; `ValueError` with file and line for a row that is not a JSON object, and for a file without any.
    """
    path, where = require_file(path), ""
    for where, values in _read_parquet(path) if path.suffix == ".parquet" else _read_values(path):
        if not isinstance(values, dict):
            raise ValueError(f"{where}: expected a JSON object, got {shown(values)}")
        yield Row(values, where)
    if not where:
        raise ValueError(f"{path} holds no rows; expected one JSON object per line")


def _read_values(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        if path.suffix != ".txt" and file.peek(1).lstrip().startswith(b"["):
            entries = parse_json(file.read(), str(path))
            yield from ((f"{path}, entry {index}", values) for index, values in enumerate(entries, 1))
            return
        for where, line in read_lines(file, str(path)):
            try:
                yield (
                    where,
                    {FIELDS[0]: line.decode("utf-8-sig")} if path.suffix == ".txt" else parse_json(line, where),
                )
            except UnicodeDecodeError:
                raise ValueError(f"{where} is not UTF-8") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    require(str(path), "pyarrow")
    from pyarrow import parquet

    rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
    for index, row in enumerate(rows, 1):
        yield f"{path}, row {index}", row


def require_file(path: str | Path) -> Path:
    """Return `path` if it is a file, or the local copy of a dataset's on the Hub."""
    path = Path(path)
    if is_data(path):
        return fetch_data(path)[0]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(path), 200)}" + " (it is a folder)" * path.is_dir())
    return path


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """Return the prompt of each row: its `prompt`, `question` (GSM8K), first of `turns` (Spec-Bench) or first question in `conversations`.

    Conversations without a question by a person are skipped. Raises: `ValueError` with file and line for a row without any of them.
    """
    return [text.prompt for text in read_texts(path, limit)]


def read_texts(path: str | Path, limit: int | None = None, names: Sequence[str] = CONTINUATIONS) -> list[PromptText]:
    """Read prompts, see `read_prompts`, with each row's continuation under the first of `names` that it has: `answer` is GSM8K's, `reference` Spec-Bench's."""
    texts = list(islice(filter(None, (_read_text(row, names) for row in read_rows(path))), limit))
    if not texts:
        raise ValueError(f"{path} holds no prompts: no conversation has a question")
    return texts


def _read_text(row: Row, names: Sequence[str]) -> PromptText | None:
    if CONVERSATION in row.values:
        turn = _find_first_turn(row)
        # The reply in a conversation is another model's, hence no `continuation`.
        return turn if turn is None or names == CONTINUATIONS else turn._replace(continuation=None)
    prompt = row.text(*FIELDS)
    if prompt.startswith(PLACEHOLDER):
        raise ValueError(
            f"{row.where}: SPEED-Bench's placeholder in place of a prompt: fill the file in with prepare_data.py of NVIDIA's specdec_bench"
        )
    return PromptText(prompt, row.optional(*names, numbers=False), _find_limits(row))


def _find_limits(row: Row) -> dict[str, object] | None:
    """Return the limits of the text in a row, and its `hints`. Unknown keys are refused only if one resembles a limit: files have keys of many kinds."""
    limits = {} if row.values.get("hints") is None else {"hints": row.values["hints"]}
    if any(get_close_matches(str(key), LIMITS, cutoff=0.8) for key in row.values):
        limits |= read_limits(row.where, row.values, (*FIELDS, *CONTINUATIONS, "hints"))
    return limits or None


def _find_first_turn(row: Row) -> PromptText | None:
    """Return a person's first message in a row's conversation, and the model's reply if one follows; None if no person writes."""
    listed = row.values[CONVERSATION]
    turns = [turn if isinstance(turn, dict) else {} for turn in listed] if isinstance(listed, list) else [{}]
    messages = [(turn.get("from"), turn.get("value")) for turn in turns]
    if not all(isinstance(text, str) for message in messages for text in message):
        raise ValueError(f"{row.where}: expected turns with a text under 'from' and 'value', got {shown(listed)}")
    for (who, text), (next_who, reply) in zip(messages, [*messages[1:], ("", "")], strict=False):
        if who in PEOPLE and str(text).strip():
            return PromptText(str(text), reply if next_who in MODELS else None)
    return None


def read_limits(name: str, values: Mapping[str, object], others: Iterable[str]) -> dict[str, object]:
    """Return the limits of one text that are set (not None) in `values`.

    Raises: `ValueError` or `TypeError`, one line that begins with `name`, for a key that is neither a limit nor in `others`.
    """
    names = [*others, *LIMITS]
    unknown = [key for key in values if key not in names]
    if unknown:
        raise ValueError(f"{name}: {nearest('key', str(unknown[0]), names)}")
    limits = {key: values[key] for key in LIMITS if values.get(key) is not None}
    for key, value in limits.items():
        if key != "stop_strings":
            limits[key] = value = int(value) if is_int(value) else value  # also a table's, of NumPy
            check_int(f"{name}: {key}", value, *LIMITS[key])
            continue
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(text and isinstance(text, str) for text in texts)
        ):
            raise TypeError(
                f"{name}: stop_strings: expected a text or a list of texts, none of them empty, got {shown(value)}"
            )
        limits[key] = list(texts)
    return limits


# -- in parts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptFile:
    """A file of JSON lines in parts of `rows`, of which any is read by itself: no process holds all rows.

    `begins`: the first byte of each part. `path`: the file, or a dataset's on the Hub with its commit.
    """

    path: Path
    rows: int
    total: int
    begins: list[int]

    @classmethod
    def open(cls, path: Path, batch_size: int, limit: int | None) -> "PromptFile":
        """Find the parts of a file."""
        if path.suffix != ".jsonl":
            raise ValueError(f"--prompts {path}: --out continues JSON lines (.jsonl), and hla.ray.Writer tables")
        local, path = fetch_data(path) if is_data(path) else (require_file(path), path)
        total = sum(1 for _ in islice(_scan_lines(local), limit))
        if not total:
            raise ValueError(f"--prompts {path} has no rows")
        rows = max(LEAST, 8 * batch_size, -(-total // MOST_PARTS))
        return cls(path, rows, total, [begin for begin, _ in islice(_scan_lines(local), 0, total, rows)])

    @property
    def local(self) -> Path:
        """The file on this machine, to which it is downloaded if it is on the Hub."""
        return require_file(self.path)

    def read(self, index: int) -> list[JSONObject]:
        """Return the rows of a part; those that are no JSON object have an `error`.

        Rows get their number as `id` and a `prompt`, if they have others of `FIELDS` in its place.
        """
        first = index * self.rows
        count = min(self.rows, self.total - first)
        lines = islice(_scan_lines(self.local, self.begins[index]), count)
        rows = [{"id": n} | self._parse(n, line) for n, (_, line) in enumerate(lines, first)]
        if len(rows) != count:
            raise ValueError(f"--prompts {self.path} has changed since the job began: start again with another --out")
        return rows

    def _parse(self, row_id: int, line: bytes) -> JSONObject:
        where = f"{self.path.name}, row {row_id} (the first is 0)"
        try:
            values = parse_json(line, where)
            if not isinstance(values, dict):
                raise ValueError(f"{where}: expected a JSON object")
            if not values.get("prompt") and values.get("messages") is None:
                row = Row(values, where)
                turn = _find_first_turn(row) if CONVERSATION in values else None
                text = row.optional(*FIELDS) if turn is None else turn.prompt
                values |= {} if text is None else {"prompt": text}
        except ValueError as error:
            return {"error": one_line(error)}
        return values


def _scan_lines(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its first byte."""
    with open(path, "rb") as file:
        file.seek(begin)
        for line in file:
            if line.strip():
                yield begin, line
            begin += len(line)


def list_errors(paths: Iterable[Path]) -> list[str]:
    """Return the errors in written parts."""
    lines = (line for path in paths for _, line in _scan_lines(path))
    return [error for line in lines if (error := json.loads(line)["error"]) is not None]
