"""Write the folder of a dataset for the `datasets` package at the end of a run, and read it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifacts.files import format_json, write_text
from ..artifacts.json_io import JSONObject, read_object
from ..validation import one_line
from .run_folder import RunFolder


if TYPE_CHECKING:
    from datasets import Dataset


def finish_dataset(
    run: RunFolder,
    facts: JSONObject,
    make: Callable[[Path], "Dataset"],
    card: Callable[[JSONObject, "Dataset"], str],
    **saving: object,
) -> None:
    """Write the dataset that `make(cache)` returns, with the record `facts` and its card, as the result of `run`.

    `cache`: a folder for temporary files. `saving`: of `Dataset.save_to_disk`.
    """
    with run.result() as folder:
        data = make(folder / "cache")
        data.save_to_disk(str(folder), **saving)
        write_text(folder / run.record, format_json(facts))
        write_text(folder / "README.md", card(facts, data))
        shutil.rmtree(folder / "cache", ignore_errors=True)


def open_dataset(folder: Path, record: str, command: str) -> JSONObject:
    """Read the record of a finished dataset made by `command`. Raises: `ValueError`, one line, for any other folder."""
    if not (folder / record).is_file():
        unfinished = Path(f"{folder}.partial").is_dir()
        hint = f" ({folder}.partial is unfinished: {command.partition(' --')[0]} --resume)" if unfinished else ""
        raise ValueError(f"{folder} is no dataset of {command}: no {record} in it{hint}")
    return read_object(folder / record, f"an object, the record of {command}")


@contextmanager
def name_unreadable(folder: Path) -> Iterator[None]:
    """Guard code that reads a dataset: turn any error, since damaged files raise many types, into a `ValueError` that names `folder`."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{folder} cannot be read ({one_line(f'{type(error).__name__}: {error}')}): make it again"
        ) from None


def load_rows(folder: Path) -> "Dataset":
    """Load the rows of a finished dataset. Raises: `ValueError`, one line, if they cannot be read."""
    from datasets import load_from_disk

    with name_unreadable(folder):
        try:
            return load_from_disk(str(folder))
        except IndexError:  # raised by `datasets` for a dataset that was saved without rows
            return []
