"""Read JSON from untrusted sources: files, the Hub, a server.

Python's parser takes duplicate keys, NaN, infinities and numbers beyond a float's range in silence; they are refused here.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias, get_type_hints

from huggingface_hub.dataclasses import type_validator

from ..validation import one_line, shown


JSONObject: TypeAlias = dict[
    str, Any
]  # for objects whose entries were checked; one that is only passed on is `dict[str, object]`
LONGEST = 16 * 2**20  # bytes of a file, of a line of a JSON-lines file, or of a reply


def read_json(path: str | Path, where: str | None = None, *, infinite: bool = False, longest: int = LONGEST) -> Any:
    """Read the value in a JSON file. `where`: its name in errors, by default the path; `infinite`: accept Infinity.

    Raises: `ValueError`, one line; `OSError` for a file that cannot be read.
    """
    where = str(path) if where is None else where
    if Path(path).stat().st_size > longest:
        raise ValueError(f"{where} has more than {longest} bytes: this is not what belongs there")
    return parse_json(Path(path).read_bytes(), where, infinite=infinite)


def read_object(path: str | Path, what: str = "an object") -> JSONObject:
    """Read the object in a JSON file; `what`: its description for errors. Raises: `ValueError`, one line, if the file contains anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected {what}, got {shown(value)}")
    return value


def read_lines(file: IO[bytes], where: str, longest: int = LONGEST) -> Iterator[tuple[str, bytes]]:
    """Yield the non-blank lines of a JSON-lines file, each with its name for errors, reading one at a time."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise ValueError(f"{where}, line {number} has more than {longest} bytes: this is not a file of JSON lines")
        if line.strip():
            yield f"{where}, line {number}", line.rstrip(b"\r\n")


def parse_json(data: str | bytes, where: str, *, infinite: bool = False) -> Any:
    """Parse a JSON text; `where` names it in errors. Raises: `ValueError`, one line."""

    def parse_number(digits: str) -> float:
        number = float(digits)
        if number - number != 0 and not (infinite and digits.endswith("Infinity")):
            raise ValueError(f"{digits[:20]} is no number that a float holds")
        return number

    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, object_pairs_hook=_build_object, parse_float=parse_number, parse_constant=parse_number)
    except RecursionError:
        raise ValueError(f"{where} is not JSON: too many lists and objects inside one another") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def check_types(record: Any) -> None:
    """Refuse a dataclass with values of other types than its fields'. Raises: `TypeError`, one line."""
    kinds = get_type_hints(type(record))
    for field in dataclasses.fields(record):
        try:
            type_validator(field.name, getattr(record, field.name), kinds[field.name])
        except TypeError as error:
            raise TypeError(one_line(error, 300)) from None


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return entries
