"""Files and folders that are written completely or not at all."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..validation import one_line


# Errors of a full or failing disk or quota: if one occurs during a write, Python's message names no file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder; if the context ends without an error, rename it to `path`, or move its files into an existing folder.

    Raises: `ValueError`, one line, before anything is moved, where `find_file` refuses a file of an existing folder.
    """
    path = Path(path)
    refuse_dangling(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is no folder: pass the name of a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        os.chmod(made, 0o755)  # mkdtemp makes it private
        with name_full_disk(path):
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
    except RecursionError:
        raise ValueError(f"{what} could not be read back: lists and objects without end inside one another") from None
    except (TypeError, ValueError) as error:
        line = str(error).replace(f"{folder}{os.sep}", "")
        raise ValueError(f"{what} could not be read back, so nothing was saved: {one_line(line, 300)}") from None


@contextmanager
def name_full_disk(path: str | Path) -> Iterator[None]:
    """Guard code that writes `path`: add the path to the error of a full or failing disk, which Python reports without one."""
    try:
        yield
    except Exception as error:  # `datasets` wraps errors in one of its types
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in FULL or cause.filename is not None:
            raise
        raise OSError(cause.errno, os.strerror(cause.errno), str(path)) from None


def check_new(path: str | Path, again: str = "start again") -> None:
    """Refuse, before any work, a path where no new folder can be made. `again`: why to delete the old one. Raises: `ValueError`, one line."""
    path = Path(path)
    refuse_dangling(path)
    if path.exists():
        raise ValueError(f"{path} exists: choose another --out, or delete it to {again}")
    _check_folder(next(folder for folder in path.absolute().parents if os.path.lexists(folder)), path)


def check_file(name: str, path: str | Path) -> None:
    """Refuse, before any work, a path where no file can be written. `name`: the option, for the error. Raises: `ValueError`, one line."""
    _check_folder(find_file(path, f"{name}: ").parent, f"{name}: {path}")


def find_file(path: str | Path, name: str = "") -> Path:
    """Return the file to write for `path`: a link's goal. Raises: `ValueError`, one line, for a folder, a pipe, a device: it would be replaced."""
    path, goal = Path(path), Path(os.path.realpath(path))
    if (path.exists() or goal.is_symlink()) and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise ValueError(f"{name}{path} is {what}: pass the name of a file")
    return goal


def refuse_dangling(path: Path) -> None:
    """Refuse a dangling link, which no folder can replace. Raises: `ValueError`, one line."""
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a link to {one_line(os.readlink(path))}, which is not there: choose another name, or delete the link"
        )


def _check_folder(folder: Path, what: str | Path) -> None:
    """Refuse a folder into which `what` cannot be written."""
    if not folder.is_dir():
        raise ValueError(f"{what}: there is no folder {folder}: choose another place, or make it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: nothing can be written into {folder}: choose another place")


def format_json(value: object) -> str:
    """Return `value` as the text of a JSON file. Raises: `ValueError` or `TypeError` for values that JSON lacks, such as NaN."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: str | Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it. Follows a link; raises as `find_file` does."""
    path = find_file(path)
    part = path.with_name(f".{path.name}.part")
    if part.is_symlink() or not part.is_file():  # planted there, to be followed
        part.unlink(missing_ok=True)
    try:
        with name_full_disk(path):
            part.write_bytes(data)
    except OSError:
        part.unlink(missing_ok=True)  # a partial file on a full disk
        raise
    os.replace(part, path)


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file, which is read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
