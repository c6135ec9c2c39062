"""Finish, seal and open the folder of a dataset for the `datasets` package."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifacts.files import hash_file, new_folder, write_text
from ..artifacts.json_io import JSONObject, read_object
from ..validation import one_line, shown
from .resumable import WHOLE, clear, write_record


if TYPE_CHECKING:
    from datasets import Dataset

STATE = "state.json"  # written by `datasets`: which files hold the rows
BESIDE = (STATE, "dataset_info.json")  # files that `datasets` writes beside the rows; version 0.1.0 did not seal them
AGAIN = "make the dataset again"


def finish_dataset(
    out: Path,
    part: Path,
    record: str,
    facts: Mapping[str, object],
    make: Callable[[Path], "Dataset"],
    card: Callable[[JSONObject, "Dataset"], str],
    **saving: object,
) -> None:
    """Write the dataset that `make(cache)` returns into `out`, with its record and its card, and clear the unfinished run.

    `cache`: a folder for temporary files. `saving`: of `Dataset.save_to_disk`.
    """
    with new_folder(part / WHOLE) as folder:
        cache = folder / "cache"
        data = make(cache)
        data.save_to_disk(str(folder), **saving)
        facts = dict(facts) | {"files": seal_dataset(folder)}
        write_record(folder / record, facts)
        write_text(folder / "README.md", card(facts, data))
        shutil.rmtree(cache, ignore_errors=True)
    os.rename(part / WHOLE, out)
    clear(part, record)


def seal_dataset(folder: Path) -> dict[str, str]:
    """Return `hash_files` of a newly written dataset, the same for the same rows.

    `datasets` draws the fingerprint, which names cached files, at random; it is replaced by a hash of the rows.
    """
    rows = "".join(hash_file(file) for file in sorted(folder.glob("*.arrow")))
    state = read_object(folder / STATE) | {"_fingerprint": hashlib.sha256(rows.encode()).hexdigest()[:16]}
    write_record(folder / STATE, state)
    return hash_files(folder)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a finished dataset that is read again, by name."""
    files = [*folder.glob("*.arrow"), *(folder / name for name in BESIDE)]
    return {file.name: hash_file(file) for file in sorted(files)}


def open_dataset(folder: Path, record: str, command: str) -> JSONObject:
    """Read the record of a finished dataset made by `command`. Raises: `ValueError`, one line, for any other folder."""
    if not (folder / record).is_file():
        unfinished = Path(f"{folder}.partial").is_dir()
        hint = f" ({folder}.partial is unfinished: {command.partition(' --')[0]} --resume)" if unfinished else ""
        raise ValueError(f"{folder} is no dataset of {command}: no {record} in it{hint}")
    return read_object(folder / record, f"an object, the record of {command}")


def load_rows(folder: Path) -> "Dataset":
    """Load the rows of a finished dataset. Raises: `ValueError`, one line, if they cannot be read."""
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except IndexError:  # raised by `datasets` for a dataset that was saved without rows
        return []
    except Exception as error:  # damaged files make `datasets` raise errors of any type
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{folder} cannot be read ({reason}): {AGAIN}") from None


def check_files(folder: Path, facts: Mapping[str, object]) -> None:
    """Refuse a finished dataset whose files differ from those in its record, or that reads other files."""
    recorded = facts.get("files")
    if not isinstance(recorded, dict):
        given = "none" if recorded is None else shown(recorded)
        raise ValueError(f"{folder}: files: expected the SHA-256 of each file in the record, got {given}: {AGAIN}")
    for name, digest in recorded.items():
        file = folder / Path(name).name
        if not file.is_file() or hash_file(file) != digest:
            raise ValueError(f"{file} is damaged (its SHA-256 is not the recorded one): {AGAIN}")
    for name in _list_data_files(folder / STATE):
        if name not in recorded:  # perhaps of another folder
            raise ValueError(f"{folder / STATE} names the file {shown(name)}, which the record does not: {AGAIN}")


def _list_data_files(state: Path) -> list[str]:
    """Return the files that `datasets` would read the rows from."""
    if not state.is_file():
        raise ValueError(f"{state} is missing: {AGAIN}")
    files = read_object(state, "an object, the files of a dataset").get("_data_files")
    named = isinstance(files, list) and all(isinstance(f, dict) and isinstance(f.get("filename"), str) for f in files)
    if not isinstance(files, list) or not named:
        raise ValueError(f"{state}: _data_files: expected the names of files, got {shown(files)}: {AGAIN}")
    return [file["filename"] for file in files]


def check_entries(facts: Mapping[str, object], kinds: Mapping[str, type | tuple[type, ...]], where: Path) -> None:
    """Refuse a record that lacks one of the entries `kinds`, or has another type there."""
    for name, kind in kinds.items():
        if name not in facts:
            raise ValueError(f"{where} does not say its {name}: {AGAIN}")
        if not isinstance(facts[name], kind) or (isinstance(facts[name], bool) and kind is not bool):
            raise ValueError(f"{where}: {name}: got {shown(facts[name])}: {AGAIN}")
