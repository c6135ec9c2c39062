"""Files and folders that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def write_text(path: str | Path, text: str) -> None:
    """Write a text file under a temporary name, then rename it."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
