"""Read JSON from untrusted sources: files, the Hub, a server.

Refused in one line: more than `LONGEST` bytes, more than `DEEPEST` nested lists and objects, duplicate keys in an object, NaN and infinities,
numbers beyond a float's range, unpaired surrogates, and bytes that are not UTF-8.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..validation import shown


JSONObject: TypeAlias = dict[
    str, Any
]  # for objects whose entries were checked; one that is only passed on is `dict[str, object]`
LONGEST = 16 * 2**20  # bytes of a file, of a line of a JSON-lines file, or of a reply
BLOCK = 2**24  # bytes read at a time
DEEPEST = 64  # nested lists and objects
DIGITS = 308  # of an integer: the range of a float
_MARKS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: str | Path, where: str | None = None, *, infinite: bool = False, longest: int = LONGEST) -> Any:
    """Read the value in a JSON file. `where`: its name in errors, by default the path; `infinite`: accept Infinity.

    Raises: `ValueError`, one line; `OSError` for a file that cannot be read.
    """
    where = str(path) if where is None else where
    return parse_json(read_whole(path, longest, where), where, infinite=infinite)


def read_whole(path: str | Path, most: int = LONGEST, where: str | None = None) -> bytes:
    """Return a file's bytes. `where`: its name in errors. Raises: `ValueError`, one line, for more than `most`, without reading them all."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size  # 0 for a device
        data = bytearray()
        # In blocks, since Python would allocate `most` bytes at once; up to the end instead of the size, since the file may grow.
        while size <= most and len(data) <= most and (block := file.read(min(most + 1 - len(data), BLOCK))):
            data += block
    if max(size, len(data)) > most:
        raise ValueError(f"{where or path} has more than {most} bytes: this is not what belongs there")
    return bytes(data)


def read_object(path: str | Path, what: str = "an object") -> JSONObject:
    """Read the object in a JSON file; `what`: its description for errors. Raises: `ValueError`, one line, if the file contains anything else."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected {what}, got {shown(found)}")
    return found


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
    """Parse a JSON text; `where` names it in errors."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not JSON: not UTF-8 ({error.reason} at byte {error.start})") from None
    if _depth(text) > DEEPEST:
        raise ValueError(f"{where}: more than {DEEPEST} lists and objects inside one another")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_build_object,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=lambda name: _parse_constant(name, infinite),
        )
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where} is not JSON: a text in it holds half of a surrogate pair") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    return value


def check_depth(value: object, where: str) -> None:
    """Refuse lists and mappings that are nested more than `DEEPEST` deep, or contain themselves."""
    level = [value] if isinstance(value, Mapping | list | tuple) else []
    for _ in range(DEEPEST):
        inside = [
            part
            for one in level
            for part in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(part, Mapping | list | tuple)
        ]
        if not inside:
            return
        level = list({id(part): part for part in inside}.values())
    raise ValueError(f"{where}: more than {DEEPEST} lists and objects inside one another")


def _depth(text: str) -> int:
    """Return the maximum number of open brackets, outside of texts."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return 0
    deepest = depth = 0
    inside = False  # within a text
    for match in _MARKS.finditer(text):
        mark = match.group()
        if mark == '"':
            inside = not inside
        elif inside or mark[0] == "\\":
            continue
        elif mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _parse_int(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    if abs(number := float(digits)) == float("inf"):
        raise ValueError(f"the number {shown(digits)} is too large")
    return number


def _parse_constant(name: str, infinite: bool) -> float:
    if name == "NaN" or not infinite:
        raise ValueError(f"{name} is no number of JSON")
    return float(name)
