"""Long runs that can be killed and gone on with: the folder of an unfinished one, its record, and parts sealed by checksums.

A part is a file of its own (`write_part`) or a line of a file (`sealed_line`). Its seal is a SHA-256 over what it holds, its name and what the
run is of, so a flipped byte, two files that changed places and a file of another run are all found before anything is made of them.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.files import write_bytes, write_text
from ..artifacts.reading import parse, read_object
from ..validation import shown


WHOLE = "whole"  # where the dataset is put together, inside the folder of the unfinished run
SEAL = ".sha256"  # behind the name of a part: the file with its seal
FREE = ("source", "served_at")  # entries of a record that may differ when a run is gone on with
LATER = ("found", "files")  # entries that only a finished run has


def folders(out: str | Path) -> tuple[Path, Path]:
    """The folder of a run's outcome, and beside it that of the unfinished run. `ValueError`, one line, for a path without a name."""
    out = Path(out)
    if out.name in ("", ".."):
        raise ValueError(f"--out: expected the name of a new folder, got {shown(str(out))}")
    return out, out.with_name(out.name + ".partial")


def prepare(out: Path, part: Path, facts: dict[str, Any], resume: bool, record: str) -> bool:
    """Make or check the folder of the unfinished run. True: the run was killed after its last step, all is there.

    `record`: the file that says what the run was started with.
    """
    if resume and part.is_dir() and (out / record).is_file():
        _compare(out / record, facts)
        shutil.rmtree(part)
        return True
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or delete it to start again")
    written = part / record
    if written.is_file():
        if not resume:
            raise ValueError(f"{part} holds an unfinished run: pass --resume to go on, or delete it")
        _compare(written, facts)
    else:
        part.mkdir(parents=True, exist_ok=True)
        write_text(written, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    for left in part.glob("*.part"):
        left.unlink()
    # Of a run that was killed while it put the dataset together.
    for left in (part / WHOLE, *part.glob(f".{WHOLE}.*")):
        shutil.rmtree(left, ignore_errors=True)
    return False


def _compare(written: Path, facts: dict[str, Any]) -> None:
    """Refuse to go on with a run of something else."""
    before = _flat(read_record(written), written)
    for name, here in _flat(facts, written).items():
        there = before.get(name)
        if name in (*FREE, "settings") or here == there:
            continue
        role, _, of = name.rpartition("_")
        if of == "weights":
            if there is None or here is None:  # not recorded, or a model that is not in memory
                continue
            raise ValueError(
                f"{written.parent} was made with other weights of the {role} {facts[role]['id']}, under the same name and sizes: use "
                "the same, or delete it"
            )
        raise ValueError(
            f"{written.parent} was made with {name} {shown(there, 300)}, this run has {shown(here, 300)}: use the same, or delete it"
        )


def _flat(facts: dict[str, Any], where: Path) -> dict[str, Any]:
    settings = facts.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: settings: expected an object, got {shown(settings)}: delete {where.parent}")
    return {**facts, **settings}


def read_record(file: Path) -> dict[str, Any]:
    """What a run was started with."""
    try:
        return read_object(file, "an object, the record of a run")
    except ValueError as error:
        raise ValueError(f"{error}: delete {file.parent} and start again") from None


def key_of(record: Path) -> str:
    """What a run is of, for the seals of its parts."""
    facts = {name: value for name, value in read_record(record).items() if name not in (*FREE, *LATER)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_part(file: Path, data: bytes, key: str) -> None:
    """Write a part and, before it, its seal: a part without one was never finished."""
    write_text(_seal_file(file), _seal(file.name, data, key) + "\n")
    write_bytes(file, data)


def read_part(file: Path, key: str) -> bytes | None:
    """What a finished part holds; None where it has still to be made. `ValueError`, one line, where it is not what was written."""
    if not file.is_file() or not _seal_file(file).is_file():
        return None
    data = file.read_bytes()
    expected = _seal(file.name, data, key).encode()
    with open(_seal_file(file), "rb") as seal:  # no more than a seal has: somebody else's file may be of any size
        found = seal.read(len(expected) + 2)
    if found.strip() != expected:
        raise ValueError(
            f"{file} is damaged, or of another run (its SHA-256 is not the recorded one): delete it and resume"
        )
    return data


def sealed_line(value: dict[str, Any], key: str) -> str:
    """`value` as a line of a JSON-lines file, with its seal."""
    return json.dumps({"sha256": _seal("line", _text(value), key)} | value, ensure_ascii=False) + "\n"


def unsealed(line: bytes, where: str, key: str) -> dict[str, Any]:
    """What `sealed_line` was given. `ValueError`, one line, where the line is not what was written."""
    try:
        value = parse(line, where)
        if isinstance(value, dict) and value.pop("sha256", None) == _seal("line", _text(value), key):
            return value
    except ValueError:
        pass
    raise ValueError(
        f"{where} is damaged, or of another run (its SHA-256 is not the recorded one): delete it and resume"
    )


def check_entries(facts: dict[str, Any], kinds: Mapping[str, Any], where: Path) -> None:
    """Refuse a record that lacks one of the entries `kinds`, or has another type there."""
    for name, kind in kinds.items():
        if name not in facts:
            raise ValueError(f"{where} does not say its {name}: make the dataset again")
        if not isinstance(facts[name], kind) or isinstance(facts[name], bool):
            raise ValueError(f"{where}: {name}: got {shown(facts[name])}: make the dataset again")


def digests(folder: Path, pattern: str = "*.arrow") -> dict[str, str]:
    """The SHA-256 of each file of a finished dataset, by its name."""
    return {file.name: _digest(file) for file in sorted(folder.glob(pattern))}


def check_files(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse a finished dataset whose files are not those that its record names; an older record names none."""
    recorded = facts.get("files", {})
    if not isinstance(recorded, dict):
        raise ValueError(f"{folder}: files: expected an object in the record, got {shown(recorded)}")
    for name, digest in recorded.items():
        file = folder / Path(name).name
        if not file.is_file() or _digest(file) != digest:
            raise ValueError(f"{file} is damaged (its SHA-256 is not the recorded one): make the dataset again")


def _digest(file: Path) -> str:
    with open(file, "rb") as data:
        sha = hashlib.sha256()
        while block := data.read(2**20):
            sha.update(block)
    return sha.hexdigest()


def _seal_file(file: Path) -> Path:
    return file.with_name(file.name + SEAL)


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _seal(name: str, data: bytes, key: str) -> str:
    return hashlib.sha256(f"{key}\0{name}\0".encode() + data).hexdigest()
