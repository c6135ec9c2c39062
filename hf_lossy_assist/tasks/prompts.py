"""Prompts from JSON-lines files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..artifacts.reading import lines, parse
from ..validation import shown


FIELDS = ("prompt", "question", "turns")  # our own, GSM8K's, Spec-Bench's (its first turn)


CONTINUATIONS = ("continuation", "answer", "reference")  # our own, GSM8K's, Spec-Bench's (of its first turn)


class Text(NamedTuple):
    """A prompt and, where there is one, the text that a person wrote after it."""

    prompt: str
    continuation: str | None = None


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """The prompt of each line: its `prompt`, `question` (GSM8K) or first of `turns` (Spec-Bench).

    Raises: `ValueError` with file and line where a line has none of them; `FileNotFoundError`.
    """
    return [text.prompt for text in read_texts(path, limit)]


def read_texts(path: str | Path, limit: int | None = None) -> list[Text]:
    """As `read_prompts`, with each line's `continuation`, `answer` (GSM8K) or first `reference` (Spec-Bench), if it has one."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {shown(str(path), 200)}")
    texts: list[Text] = []
    with path.open("rb") as file:
        for where, line in lines(file, str(path)):
            if limit is not None and len(texts) == limit:
                break
            row = parse(line, where)
            prompt = _first(row, FIELDS)
            if prompt is None:
                given = line[:80].decode("utf-8", "replace")[:60]
                raise ValueError(f"{where}: expected a text under one of {', '.join(FIELDS)}, got {shown(given, 200)}")
            if not prompt.strip():
                raise ValueError(f"{where}: the prompt is blank: every prompt needs some text")
            texts.append(Text(prompt, _first(row, CONTINUATIONS)))
    if not texts:
        raise ValueError(
            f"{path} holds no prompts; expected one JSON object per line, with a text under one of {', '.join(FIELDS)}"
        )
    return texts


def _first(row: Any, fields: Sequence[str]) -> str | None:
    """The text under the first of `fields` that `row` has something under; of a list its first entry."""
    found = next((row[f] for f in fields if isinstance(row, dict) and row.get(f)), None)
    found = found[0] if isinstance(found, list) else found
    return found if isinstance(found, str) else None
