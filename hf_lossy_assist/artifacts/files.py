"""Files and folders that are written completely or not at all, and JSON from untrusted sources: files, the Hub, a server."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias, get_type_hints

from huggingface_hub.dataclasses import type_validator

from ..validation import one_line, shown


# For objects whose entries were checked; one that is only passed on is `dict[str, object]`.
JSONObject: TypeAlias = dict[str, Any]
LONGEST = 16 * 2**20  # bytes of a JSON file


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder; if the context ends without an error, rename it to `path`, or move its files into an existing folder.

    Raises: `ValueError`, one line, before anything is moved, where `find_file` refuses a file of an existing folder.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"{path} is no folder: pass the name of a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        os.chmod(temporary, 0o755)  # mkdtemp makes it private
        yield temporary
        if path.exists():
            files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
            goals = [find_file(path / file.relative_to(temporary)) for file in files]
            for file, goal in zip(files, goals, strict=True):
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file, goal)  # a link may lead to another disk
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new(path: str | Path, again: str = "start again") -> None:
    """Refuse, before any work, a path where no new folder can be made. `again`: why to delete the old one. Raises: `ValueError`, one line."""
    path = Path(path)
    if os.path.lexists(path):
        raise ValueError(f"{path} exists: choose another --out, or delete it to {again}")
    _check_folder(next(folder for folder in path.absolute().parents if os.path.lexists(folder)), path)


def check_file(name: str, path: str | Path) -> None:
    """Refuse, before any work, a path where no file can be written. `name`: the option, for the error. Raises: `ValueError`, one line."""
    _check_folder(find_file(path).parent, f"{name}: {path}")


def find_file(path: str | Path) -> Path:
    """Return the file to write for `path`: a link's goal. Raises: `ValueError`, one line, for a folder, a pipe, a device: it would be replaced."""
    goal = Path(os.path.realpath(path))
    if os.path.lexists(goal) and not goal.is_file():
        raise ValueError(f"{path} is no regular file: pass the name of a file")
    return goal


def _check_folder(folder: Path, what: str | Path) -> None:
    """Refuse a folder into which `what` cannot be written."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: {folder} is no folder that can be written into: choose another place, or make it")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it. Follows a link; raises as `find_file` does."""
    goal = find_file(path)
    with tempfile.TemporaryDirectory(prefix=f".{goal.name}.", dir=goal.parent) as temporary:
        Path(temporary, goal.name).write_bytes(data)
        os.replace(Path(temporary, goal.name), goal)


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file, which is read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# -- JSON -------------------------------------------------------------------------------------------------------------


def format_json(value: object) -> str:
    """Return `value` as the text of a JSON file. Raises: `ValueError` or `TypeError` for values that JSON lacks, such as NaN."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file. Raises: `ValueError`, one line, if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: str | Path, where: str | None = None, *, infinite: bool = False) -> Any:
    """Read the value in a JSON file. `where`: its name in errors, by default the path; `infinite`: accept Infinity.

    Raises: `ValueError`, one line.
    """
    where = str(path) if where is None else where
    if os.path.isfile(path) and os.path.getsize(path) > LONGEST:
        raise ValueError(f"{where} has more than {LONGEST} bytes")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{where} is a device or a pipe")
    return parse_json(read_bytes(path), where, infinite=infinite)


def read_object(path: str | Path) -> JSONObject:
    """Read the object in a JSON file. Raises: `ValueError`, one line, if the file contains anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object, got {shown(value)}")
    return value


def read_lines(file: IO[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    """Yield the non-blank lines of a JSON-lines file, each with its name for errors, reading one at a time."""
    for i, line in enumerate(file, 1):
        if line.strip():
            yield f"{where}, line {i}", line.rstrip(b"\r\n")


def parse_json(data: str | bytes, where: str, *, infinite: bool = False) -> Any:
    """Parse a JSON text; `where` names it in errors. Raises: `ValueError`, one line.

    Python's parser takes duplicate keys, NaN, infinities and numbers beyond a float's range in silence; they are refused here.
    """

    def parse_number(digits: str) -> float:
        value = float(digits)
        if value - value != 0 and not (infinite and digits.endswith("Infinity")):
            raise ValueError(f"{digits[:20]} is no number that a float holds")
        return value

    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(
            text, object_pairs_hook=_build_object, parse_float=parse_number, parse_constant=parse_number
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # no half surrogate pairs
        return value
    except RecursionError:
        raise ValueError(f"{where} is not JSON: too many lists and objects inside one another") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return entries


def check_types(record: Any) -> None:
    """Refuse a dataclass with values of other types than its fields'. Raises: `TypeError`, one line."""
    kinds = get_type_hints(type(record))
    for field in dataclasses.fields(record):
        try:
            type_validator(field.name, getattr(record, field.name), kinds[field.name])
        except TypeError as error:
            raise TypeError(one_line(error, 300)) from None
