"""A finished dataset: its files, which its record seals by their checksums, and what the record says."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.files import write_text
from ..artifacts.reading import read_object
from ..validation import shown


STATE = "state.json"  # of `datasets`: which files hold the rows
BESIDE = (STATE, "dataset_info.json")  # what `datasets` writes beside them; version 0.1.0 did not seal it
AGAIN = "make the dataset again"


def seal(folder: Path) -> dict[str, str]:
    """`digests` of a dataset that `datasets` has just written, the same for the same rows.

    `datasets` draws the fingerprint, by which it names cached files, at random: it becomes one of the rows' own.
    """
    rows = "".join(_digest(file) for file in sorted(folder.glob("*.arrow")))
    state = read_object(folder / STATE) | {"_fingerprint": hashlib.sha256(rows.encode()).hexdigest()[:16]}
    write_text(folder / STATE, json.dumps(state, indent=2) + "\n")
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a finished dataset that is read again, by its name."""
    files = [*folder.glob("*.arrow"), *(folder / name for name in BESIDE)]
    return {file.name: _digest(file) for file in sorted(files)}


def check_files(folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a finished dataset whose files are not those that its record names, or that reads others than these."""
    recorded = facts.get("files")
    if not isinstance(recorded, dict):
        given = "none" if recorded is None else shown(recorded)
        raise ValueError(f"{folder}: files: expected the SHA-256 of each file in the record, got {given}: {AGAIN}")
    for name, digest in recorded.items():
        file = folder / Path(name).name
        if not file.is_file() or _digest(file) != digest:
            raise ValueError(f"{file} is damaged (its SHA-256 is not the recorded one): {AGAIN}")
    for name in _read_by_datasets(folder / STATE):
        if name not in recorded:  # of another folder, it may be
            raise ValueError(f"{folder / STATE} names the file {shown(name)}, which the record does not: {AGAIN}")


def _read_by_datasets(state: Path) -> list[str]:
    """The files that `datasets` would take the rows from."""
    if not state.is_file():
        raise ValueError(f"{state} is missing: {AGAIN}")
    files = read_object(state, "an object, the files of a dataset").get("_data_files")
    named = isinstance(files, list) and all(isinstance(f, dict) and isinstance(f.get("filename"), str) for f in files)
    if not isinstance(files, list) or not named:
        raise ValueError(f"{state}: _data_files: expected the names of files, got {shown(files)}: {AGAIN}")
    return [file["filename"] for file in files]


def check_entries(facts: Mapping[str, Any], kinds: Mapping[str, Any], where: Path) -> None:
    """Refuse a record that lacks one of the entries `kinds`, or has another type there."""
    for name, kind in kinds.items():
        if name not in facts:
            raise ValueError(f"{where} does not say its {name}: {AGAIN}")
        if not isinstance(facts[name], kind) or (isinstance(facts[name], bool) and kind is not bool):
            raise ValueError(f"{where}: {name}: got {shown(facts[name])}: {AGAIN}")


def _digest(file: Path) -> str:
    with open(file, "rb") as data:
        sha = hashlib.sha256()
        while block := data.read(2**20):
            sha.update(block)
    return sha.hexdigest()
