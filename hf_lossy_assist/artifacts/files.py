"""Files and folders that are written completely or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..validation import one_line


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder; if the context ends without an error, rename it to `path`, or move its files into an existing folder.

    Raises: `ValueError`, one line, before anything is moved, where `find_file` refuses a file of an existing folder.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"{path} is no folder: pass the name of a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        os.chmod(made, 0o755)  # mkdtemp makes it private
        yield made
        if path.exists():
            goals = {
                file: find_file(path / file.relative_to(made)) for file in sorted(made.rglob("*")) if file.is_file()
            }
            for file, goal in goals.items():
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file, goal)  # a link may lead to another disk
        else:
            os.rename(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def check_readable(what: str, folder: Path) -> Iterator[None]:
    """Guard code that writes files into a temporary `folder` and reads them back. Raises: `ValueError`, one line, which names `what`."""
    try:
        yield
    except (RecursionError, TypeError, ValueError) as error:
        line = str(error).replace(f"{folder}{os.sep}", "")
        raise ValueError(f"{what} could not be read back, so nothing was saved: {one_line(line, 300)}") from None


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


def format_json(value: object) -> str:
    """Return `value` as the text of a JSON file. Raises: `ValueError` or `TypeError` for values that JSON lacks, such as NaN."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: str | Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it. Follows a link; raises as `find_file` does."""
    goal = find_file(path)
    with tempfile.TemporaryDirectory(prefix=f".{goal.name}.", dir=goal.parent) as made:
        Path(made, goal.name).write_bytes(data)
        os.replace(Path(made, goal.name), goal)


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file, which is read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
