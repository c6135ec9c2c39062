"""Long runs that can be killed and gone on with: the folder of an unfinished one, its record, and parts sealed by checksums.

A part is a file of its own (`write_part`) or a line of a file (`sealed_line`). Its seal is a SHA-256 over what it holds, its name and what the
run is of, so a flipped byte, two files that changed places and a file of another run are all found before anything is made of them.
"""

import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from ..artifacts.files import check_new, refuse_dangling, write_bytes, write_text
from ..artifacts.reading import parse, read_object
from ..validation import listed, shown


WHOLE = "whole"  # where the dataset is put together, inside the folder of the unfinished run
SEAL = ".sha256"  # behind the name of a part: the file with its seal
FREE = ("source", "served_at")  # entries of a record that may differ when a run is gone on with
# What runs write: parts and their seals, the folder in which a dataset is put together, and what that holds beside its record.
_PART = re.compile(r"(\d{5,}\.(parquet|jsonl|safetensors)|\d+-\d{6,}\.safetensors)(\.sha256)?|\d{5,}\.part")
_UNFINISHED = re.compile(rf"\.{WHOLE}\.\w{{8}}")
_DATASET = re.compile(r"data-\d+-of-\d+\.arrow|state\.json|dataset_info\.json|README\.md")
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
        clear(part, record)
        return True
    check_new(out)
    refuse_dangling(part)
    written = part / record
    if written.is_file():
        if not resume:
            raise ValueError(f"{part} holds an unfinished run: pass --resume to go on, or delete it")
        _compare(written, facts)
    else:
        part.mkdir(parents=True, exist_ok=True)
        others = [file.name for file in part.iterdir() if file.name != f".{record}.part"]
        if others:
            raise ValueError(
                f"{part} is to hold the unfinished run, and it has other files and no {record}: {listed(sorted(others), 5)}; choose "
                "another --out, or move them"
            )
        write_text(written, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    for left in list(part.iterdir()):
        if left.suffix == ".part" and _is_ours(left, record):
            left.unlink()
    _drop_wholes(part, record)
    if (part / WHOLE).exists():
        raise ValueError(f"{part / WHOLE} holds files that no run wrote: move them, or delete it")
    return False


def clear(part: Path, record: str) -> None:
    """Take the folder of a run away that is over: what the run wrote, its record last, and then the folder, if nothing else is in it."""
    if (part / record).is_file():  # without one it is somebody else's
        _drop_wholes(part, record)
        for file in sorted(part.iterdir(), key=lambda file: file.name == record):
            if _is_ours(file, record):
                file.unlink()
    try:
        part.rmdir()
    except OSError:
        found = listed(sorted(file.name for file in part.iterdir()), 5)
        warnings.warn(f"{part} stays, for it holds files that the run did not write: {found}", stacklevel=2)


def _is_ours(file: Path, record: str) -> bool:
    """Whether a run writes files of this name, or of that under which they are unfinished."""
    hidden = file.name.startswith(".") and file.name.endswith(".part")
    name = file.name[1 : -len(".part")] if hidden else file.name
    return (name == record or _PART.fullmatch(name) is not None) and not file.is_dir()


def _drop_wholes(part: Path, record: str) -> None:
    """Take away what a run left that was killed while it put the dataset together."""
    for left in list(part.iterdir()):
        if _UNFINISHED.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    whole = part / WHOLE
    if whole.is_dir() and {file.name for file in whole.iterdir() if not _DATASET.fullmatch(file.name)} == {record}:
        shutil.rmtree(whole)


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


def _seal_file(file: Path) -> Path:
    return file.with_name(file.name + SEAL)


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _seal(name: str, data: bytes, key: str) -> str:
    return hashlib.sha256(f"{key}\0{name}\0".encode() + data).hexdigest()
