"""Rows of prompts and problems in files: JSON lines, a JSON array, a text with a prompt per line, Parquet; and the prompts in them."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, cast

from ..artifacts.hub import fetch_data, is_data
from ..artifacts.json_io import parse_json, read_lines
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


class Row(NamedTuple):
    """A JSON object with its position for error messages."""

    values: dict[str, object]
    where: str

    def text(self, *names: str) -> str:
        """Return the text (or number) under the first of `names` that has one. Raises: `ValueError` with file and line if none has."""
        text = self.optional(*names)
        if text is None:
            expected = f"a text under {names[0]!r}" if len(names) == 1 else f"a text under one of {', '.join(names)}"
            fields = one_line(", ".join(self.values)) or "(none)"
            raise ValueError(f"{self.where}: expected {expected}, got the fields {fields}")
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
    """Yield the rows of a file, one by one: JSON lines or a JSON array (`.gz`: compressed), Parquet, or a .txt with a prompt per line.

    Raises: `FileNotFoundError`; `ValueError` with file and line for a row that is not a JSON object, and for a file without any.
    """
    path, where = require_file(path), ""
    try:
        for where, values in _read_parquet(path) if path.suffix == ".parquet" else _read_values(path):
            if not isinstance(values, dict):
                raise ValueError(f"{where}: expected a JSON object, got {shown(values)}")
            yield Row(values, where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start} of a line") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); unpack it or drop the ending .gz") from None
    if not where:
        raise ValueError(f"{path} holds no rows; expected one JSON object per line")


def _read_values(path: Path) -> Iterator[tuple[str, object]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
        file = cast(BufferedReader, opened)
        if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        if path.suffix != ".txt" and file.peek(1).lstrip().startswith(b"["):
            entries = parse_json(file.read(), str(path))
            yield from ((f"{path}, entry {index}", values) for index, values in enumerate(entries, 1))
            return
        for where, line in read_lines(file, str(path)):
            yield where, {FIELDS[0]: line.decode()} if path.suffix == ".txt" else parse_json(line, where)


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    require(str(path), "pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        rows = (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for index, row in enumerate(rows, 1):
            yield f"{path}, row {index}", row
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file ({one_line(error, 120)})") from None


def require_file(path: str | Path) -> Path:
    """Return `path` if it is a file, or the local copy of a dataset's on the Hub. Raises: `FileNotFoundError`, one line, otherwise."""
    path = Path(path)
    if is_data(path):
        return fetch_data(path)[0]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(path), 200)}" + " (it is a folder)" * path.is_dir())
    return path


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """Return the prompt of each row: its `prompt`, `question` (GSM8K), first of `turns` (Spec-Bench) or first question in `conversations`.

    Conversations without a question by a person are skipped. Raises: `ValueError` with file and line for a row without any of them;
    `FileNotFoundError`.
    """
    return [text.prompt for text in read_texts(path, limit)]


def read_texts(path: str | Path, limit: int | None = None) -> list[PromptText]:
    """Read prompts, see `read_prompts`, with each row's `continuation`, `answer` (GSM8K) or first `reference` (Spec-Bench), if it has one."""
    texts: list[PromptText] = []
    for row in read_rows(path):
        if CONVERSATION in row.values:
            turn = find_first_turn(row)
            texts += [] if turn is None else [PromptText(*turn)]
        else:
            prompt = refuse_placeholder(row.text(*FIELDS), row.where)
            texts.append(PromptText(prompt, row.optional(*CONTINUATIONS, numbers=False), _find_limits(row)))
        if len(texts) == limit:
            break
    if not texts:
        raise ValueError(f"{path} holds no prompts: no conversation has a question")
    return texts


def _find_limits(row: Row) -> dict[str, object] | None:
    """Return the limits of the text in a row, and its `hints`. Unknown keys are refused only if one resembles a limit: files have keys of many kinds."""
    limits = {} if row.values.get("hints") is None else {"hints": row.values["hints"]}
    if any(get_close_matches(str(key), LIMITS, cutoff=0.8) for key in row.values):
        limits |= read_limits(row.where, row.values, (*FIELDS, *CONTINUATIONS, "hints"))
    return limits or None


def refuse_placeholder(prompt: str, where: str) -> str:
    """Return `prompt`. Raises: `ValueError`, one line, for a row of SPEED-Bench whose prompt has not been filled in."""
    if prompt.startswith(PLACEHOLDER):
        raise ValueError(
            f"{where}: SPEED-Bench's placeholder in place of a prompt: fill the file in with prepare_data.py of NVIDIA's specdec_bench"
        )
    return prompt


def find_first_turn(row: Row) -> tuple[str, str | None] | None:
    """Return a person's first message in a row's conversation, and the model's reply if one follows; None if no person writes.

    Raises: `ValueError`, one line, for a turn in another format.
    """
    turns = row.values.get(CONVERSATION)
    if not isinstance(turns, list):
        raise ValueError(f"{row.where}: expected a list under {CONVERSATION!r}, got {shown(turns)}")
    messages = [_read_turn(turn, row.where) for turn in turns]
    for index, (who, text) in enumerate(messages):
        if who in PEOPLE and text.strip():
            next_who, reply = messages[index + 1] if index + 1 < len(messages) else ("", "")
            return text, reply if next_who in MODELS else None
    return None


def _read_turn(turn: object, where: str) -> tuple[str, str]:
    who, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if not isinstance(who, str) or not isinstance(text, str):
        raise ValueError(f"{where}: expected turns with a text under 'from' and 'value', got {shown(turn)}")
    return who, text


def read_limits(name: str, values: Mapping[str, object], others: Iterable[str]) -> dict[str, object]:
    """Return the limits of one text that are set (not None) in `values`.

    Raises: `ValueError` or `TypeError`, one line that begins with `name`, for a key that is neither a limit nor in `others`, and for an
    invalid value.
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
