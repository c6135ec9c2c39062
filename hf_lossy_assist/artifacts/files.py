"""Files and folders that appear whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..validation import one_line


MADE_WITH = ".made-with.json"  # in a folder: with which models it was made on this machine; never shared, and taken from nobody


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; when the block ends without an error, its files take their place in `path`.

    A new folder comes with one rename. Into an existing one each file is renamed; others there stay.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        os.chmod(made, 0o755)  # mkdtemp makes it private
        yield made
        if path.exists():
            for file in sorted(p for p in made.rglob("*") if p.is_file()):
                goal = path / file.relative_to(made)
                goal.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, goal)
        else:
            os.rename(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def readable(what: str, folder: Path) -> Iterator[None]:
    """For the block that writes files into a temporary `folder` and reads them back, before they replace what can be read.

    Raises: `ValueError`, one line, where that fails; it names `what` and not the temporary folder.
    """
    try:
        yield
    except RecursionError:
        raise ValueError(f"{what} could not be read back: lists and objects without end inside one another") from None
    except (TypeError, ValueError) as error:
        said = str(error).replace(f"{folder}{os.sep}", "")
        raise ValueError(f"{what} could not be read back, so nothing was saved: {one_line(said, 400)}") from None


def json_text(value: Any) -> str:
    """`value` as our JSON files have it. `ValueError` or `TypeError` for what JSON does not have, NaN among it."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: str | Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
