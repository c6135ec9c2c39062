"""Prompts from files: JSON lines of several benchmarks, and ShareGPT's conversations as a JSON array or JSON lines."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from ..artifacts.json_io import LONGEST, parse_json, read_lines
from ..validation import MOST_NEW_TOKENS, check_int, is_int, nearest, shown
from .base import FileRow, FileTask, Problem, as_row, refuse_placeholder, require_file


FIELDS = ("prompt", "question", "turns")  # GSM8K has `question`, Spec-Bench `turns`
CONTINUATIONS = ("continuation", "answer", "reference")  # GSM8K has `answer`, Spec-Bench `reference`
PEOPLE, MODELS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")
BLOCK = 1 << 20  # characters read at a time
FIELD = "conversations"
NO_ANSWERS = "the task sharegpt has prompts and no right answers: use it with compare, or as --prompts of collect, and another task here"
_GAP = re.compile(r"[\s,]*")
# Minimum and maximum of the limits of one text.
LIMITS = {
    "max_new_tokens": (1, MOST_NEW_TOKENS),
    "min_new_tokens": (0, MOST_NEW_TOKENS),
    "stop_strings": (0, 0),
    "seed": (0, 2**63 - 1),
}


class PromptText(NamedTuple):
    """A prompt and, if there is one, its original continuation by a person; `limits`: of the text to write, and its hints."""

    prompt: str
    continuation: str | None = None
    limits: dict[str, object] | None = None


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """Return the prompt of each line: its `prompt`, `question` (GSM8K), first of `turns` (Spec-Bench) or first question in `conversations`.

    ShareGPT's JSON array is supported as well, and a .txt with a prompt per line. Conversations without a question by a person are skipped.

    Raises: `ValueError` with file and line for a line without any of them; `FileNotFoundError`.
    """
    return [text.prompt for text in read_texts(path, limit)]


def read_texts(path: str | Path, limit: int | None = None) -> list[PromptText]:
    """Read prompts, see `read_prompts`, with each line's `continuation`, `answer` (GSM8K) or first `reference` (Spec-Bench), if it has one."""
    path = require_file(path)
    texts: list[PromptText] = []
    for where, row in _read_rows(path):
        if isinstance(row, dict) and FIELD in row:
            turn = find_first_turn(row, where)
            texts += [] if turn is None else [PromptText(*turn)]
        else:
            texts.append(_read_text(row, where))
        if len(texts) == limit:
            break
    if not texts:
        raise ValueError(
            f"{path} holds no prompts; expected one JSON object per line, with a text under one of {', '.join(FIELDS)}"
        )
    return texts


def _read_text(row: object, where: str) -> PromptText:
    prompt = find_text(row, FIELDS)
    if prompt is None:
        given = json.dumps(row, ensure_ascii=False)[:60]
        raise ValueError(f"{where}: expected a text under one of {', '.join(FIELDS)}, got {shown(given, 200)}")
    if not prompt.strip():
        raise ValueError(f"{where}: the prompt is blank: every prompt needs some text")
    refuse_placeholder(prompt, where)
    return PromptText(prompt, find_text(row, CONTINUATIONS), _find_limits(row, where))


def _find_limits(row: object, where: str) -> dict[str, object] | None:
    """Return the limits of the text in a row, and its `hints`. Unknown keys are refused only if one resembles a limit: files have keys of many kinds."""
    if not isinstance(row, dict):
        return None
    found = {} if row.get("hints") is None else {"hints": row["hints"]}
    if any(get_close_matches(str(key), LIMITS, cutoff=0.8) for key in row):
        found |= read_limits(where, row, (*FIELDS, *CONTINUATIONS, "hints"))
    return found or None


def _read_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the values in a file of JSON lines, of a JSON array, or of a .txt with a prompt per line, each with its name for errors."""
    if path.suffix != ".txt" and holds_array(path):
        yield from read_array(path)
        return
    plain = path.suffix == ".txt"
    with path.open("rb") as file:
        for where, line in read_lines(file, str(path)):
            yield where, {FIELDS[0]: _decode(line, where)} if plain else parse_json(line, where)


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from None


def find_text(row: object, fields: Sequence[str]) -> str | None:
    """Return the text under the first of `fields` for which `row` has a value; for a list its first entry."""
    found = next((row[f] for f in fields if isinstance(row, dict) and row.get(f)), None)
    found = found[0] if isinstance(found, list) else found
    return found if isinstance(found, str) else None


def holds_array(path: Path) -> bool:
    """Return whether a file begins like a JSON array."""
    with path.open("rb") as file:
        return file.read(4096).lstrip().startswith(b"[")


def read_array(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the values of the JSON array in a file, one by one, each with its name for errors; only one entry is in memory at a time.

    Raises: `ValueError`, one line, if it is not an array, is not UTF-8, or has an entry of more than `LONGEST` characters.
    """
    try:
        with path.open(encoding="utf-8") as file:
            yield from _read_entries(file, str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: not UTF-8 ({error.reason})") from None


def _read_entries(file: IO[str], where: str) -> Iterator[tuple[str, object]]:
    decoder, number = json.JSONDecoder(), 0
    text, place = file.read(BLOCK).lstrip()[1:], 0
    while True:
        gap = _GAP.match(text, place)
        place = gap.end() if gap else place
        if text.startswith("]", place):
            return
        try:
            end = decoder.raw_decode(text, place)[1]
        except (ValueError, RecursionError):
            end = 0
        if 0 < end < len(text):
            number += 1
            yield f"{where}, entry {number}", parse_json(text[place:end], f"{where}, entry {number}")
            place = end
            continue
        more = file.read(BLOCK)  # the entry may continue there
        if not more or len(text) - place > LONGEST:
            raise ValueError(
                f"{where}, entry {number + 1} is not JSON, has more than {LONGEST} characters, or the array does not end"
            )
        text, place = text[place:] + more, 0


def find_first_turn(values: dict[str, object], where: str) -> tuple[str, str | None] | None:
    """Return a person's first message in a row's conversation, and the model's reply if one follows; None if no person writes.

    Raises: `ValueError`, one line, for a turn in another format.
    """
    turns = values.get(FIELD)
    if not isinstance(turns, list):
        raise ValueError(f"{where}: expected a list under {FIELD!r}, got {shown(turns)}")
    parts = [_read_turn(turn, where) for turn in turns]
    for place, (who, text) in enumerate(parts):
        if who in PEOPLE and text.strip():
            follows = parts[place + 1] if place + 1 < len(parts) else ("", "")
            return text, follows[1] if follows[0] in MODELS else None
    return None


def _read_turn(turn: object, where: str) -> tuple[str, str]:
    pair = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if not isinstance(pair[0], str) or not isinstance(pair[1], str):
        raise ValueError(f"{where}: expected turns with a text under 'from' and 'value', got {shown(turn)}")
    return pair[0], pair[1]


class ShareGPT(FileTask):
    """First questions of ShareGPT's conversations: prompts for comparing speed and for collecting.

    A file is a JSON array, as published, or JSON lines. There are no right answers, so uses that need them are refused.
    """

    name = "sharegpt"

    def rows(self) -> Iterator[FileRow]:
        if not isinstance(self.path, Path) or not holds_array(self.path):
            rows = super().rows()
        else:
            rows = (as_row(value, where) for where, value in read_array(self.path))
        return (row for row in rows if find_first_turn(row.values, row.where) is not None)

    def problem(self, row: FileRow) -> Problem:
        found = find_first_turn(row.values, row.where)
        assert found is not None, "rows() passes over the others"
        return Problem(found[0], None, {} if found[1] is None else {"reference": found[1]})

    def extract(self, problem: Problem, response: str) -> NoReturn:
        raise ValueError(NO_ANSWERS)

    def same(self, problem: Problem, reference: str, answer: str) -> NoReturn:
        raise ValueError(NO_ANSWERS)


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
        least, most = LIMITS[key]
        if is_int(value):  # also a table's, of NumPy
            limits[key] = value = int(value)
        if key != "stop_strings":
            check_int(f"{name}: {key}", value, least, most)
            continue
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise TypeError(
                f"{name}: stop_strings: expected a text or a list of texts, none of them empty, got {shown(value)}"
            )
        limits[key] = list(texts)
    return limits
