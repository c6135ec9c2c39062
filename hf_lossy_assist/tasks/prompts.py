"""Prompts from JSON-lines files."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..artifacts.json_io import parse_json, read_lines
from ..validation import shown
from .conversations import FIELD, find_first_turn, holds_array, read_array


FIELDS = ("prompt", "question", "turns")  # our own, GSM8K's, Spec-Bench's (its first turn)


CONTINUATIONS = ("continuation", "answer", "reference")  # our own, GSM8K's, Spec-Bench's (of its first turn)


class PromptText(NamedTuple):
    """A prompt and, where there is one, the text that a person wrote after it."""

    prompt: str
    continuation: str | None = None


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """Return the prompt of each line: its `prompt`, `question` (GSM8K), first of `turns` (Spec-Bench) or what a person asked first in its
    `conversations` (ShareGPT, whose JSON array is read as well; where no person asked, the row is passed over).

    Raises: `ValueError` with file and line where a line has none of them; `FileNotFoundError`.
    """
    return [text.prompt for text in read_texts(path, limit)]


def read_texts(path: str | Path, limit: int | None = None) -> list[PromptText]:
    """Read prompts as `read_prompts` does, with each line's `continuation`, `answer` (GSM8K) or first `reference` (Spec-Bench), if it has one."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(path), 200)}")
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


def _read_text(row: Any, where: str) -> PromptText:
    """Return the prompt in a row, and what follows it."""
    prompt = _first(row, FIELDS)
    if prompt is None:
        given = json.dumps(row, ensure_ascii=False)[:60]
        raise ValueError(f"{where}: expected a text under one of {', '.join(FIELDS)}, got {shown(given, 200)}")
    if not prompt.strip():
        raise ValueError(f"{where}: the prompt is blank: every prompt needs some text")
    return PromptText(prompt, _first(row, CONTINUATIONS))


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values in a file of JSON lines, or of a JSON array, each with its name for errors."""
    if holds_array(path):
        yield from read_array(path)
        return
    with path.open("rb") as file:
        for where, line in read_lines(file, str(path)):
            yield where, parse_json(line, where)


def _first(row: Any, fields: Sequence[str]) -> str | None:
    """Return the text under the first of `fields` that `row` has something under; of a list its first entry."""
    found = next((row[f] for f in fields if isinstance(row, dict) and row.get(f)), None)
    found = found[0] if isinstance(found, list) else found
    return found if isinstance(found, str) else None
