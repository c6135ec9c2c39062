"""Run long jobs that can be killed and resumed: the folder of an unfinished run, its record, parts sealed by checksums, and the finished dataset.

A part is a file (`write_part`) or a line of a file (`seal_line`). Its seal is a SHA-256 over its content, its name and the run's record,
so a flipped byte, two swapped files and a file of another run are all found before anything is made of them."""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..artifacts.files import check_new, refuse_dangling, write_bytes, write_text
from ..artifacts.json_io import parse_json, read_object
from ..terminal import Bar
from ..validation import listed, shown
from .processes import ALONE, Lock, Processes


WHOLE = "whole"  # where the dataset is put together, inside the folder of the unfinished run
SEAL = ".sha256"  # behind the name of a part: the file with its seal
FREE = ("source", "served_at")  # entries of a record that may differ when a run is gone on with
# What runs write: parts and their seals, the folder in which a dataset is put together, and what that holds beside its record.
_PART = re.compile(r"(\d{5,}\.(parquet|jsonl|safetensors)|\d+-\d{6,}\.safetensors)(\.sha256)?|\d{5,}\.part")
_UNFINISHED = re.compile(rf"\.{WHOLE}\.\w{{8}}")
_DATASET = re.compile(r"data-\d+-of-\d+\.arrow|state\.json|dataset_info\.json|README\.md")
LATER = ("found", "files")  # entries that only a finished run has


def folders(out: str | Path) -> tuple[Path, Path]:
    """Return the folder of a run's outcome, and beside it that of the unfinished run. `ValueError`, one line, for a path without a name."""
    out = Path(out)
    if out.name in ("", ".."):
        raise ValueError(f"--out: expected the name of a new folder, got {shown(str(out))}")
    return out, out.with_name(out.name + ".partial")


def prepare(out: Path, part: Path, facts: dict[str, Any], resume: bool, record: str) -> bool:
    """Make or check the folder of the unfinished run. True: the run was killed after its last step, all is there.

    `record`: the file that says what the run was started with.
    """
    if resume and part.is_dir() and (out / record).is_file():
        _refuse_other_run(out / record, facts)
        clear(part, record)
        return True
    check_new(out)
    refuse_dangling(part)
    written = part / record
    if written.is_file():
        if not resume:
            raise ValueError(f"{part} holds an unfinished run: pass --resume to go on, or delete it")
        _refuse_other_run(written, facts)
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
        if left.suffix == ".part" and _is_run_file(left, record):
            left.unlink()
    _drop_unfinished(part, record)
    if (part / WHOLE).exists():
        raise ValueError(f"{part / WHOLE} holds files that no run wrote: move them, or delete it")
    return False


@contextmanager
def start_run(
    out: Path, part: Path, facts: dict[str, Any], record: str, *, resume: bool = False, processes: Processes = ALONE
) -> Iterator[bool]:
    """Hold the folder `part` of the unfinished run for the block, made or checked by the first of `processes`.

    Args:
        out: the folder of the run's outcome. facts: what the run is of. record: the file in `part` with `facts`.

    Yields: whether there is anything left to do.

    Raises: `ValueError`, one line, in all processes: another process is at it, `out` exists, or the unfinished run is of something else.
    """
    lock = Lock(part)
    try:
        processes.on_first(lock.acquire)
        processes.on_first(lambda: prepare(out, part, facts, resume, record))
        yield (part / record).is_file()
    finally:
        lock.release()


def clear(part: Path, record: str) -> None:
    """Remove the folder of a finished run: the files that the run wrote, its record last, then the folder, if nothing else is in it."""
    if (part / record).is_file():  # without one it is somebody else's
        _drop_unfinished(part, record)
        for file in sorted(part.iterdir(), key=lambda file: file.name == record):
            if _is_run_file(file, record):
                file.unlink()
    try:
        part.rmdir()
    except OSError:
        found = listed(sorted(file.name for file in part.iterdir()), 5)
        warnings.warn(f"{part} stays, for it holds files that the run did not write: {found}", stacklevel=2)


def _is_run_file(file: Path, record: str) -> bool:
    """Return whether a run writes files of this name, or of that under which they are unfinished."""
    hidden = file.name.startswith(".") and file.name.endswith(".part")
    name = file.name[1 : -len(".part")] if hidden else file.name
    return (name == record or _PART.fullmatch(name) is not None) and not file.is_dir()


def _drop_unfinished(part: Path, record: str) -> None:
    """Remove the files of a run that was killed while it put the dataset together."""
    for left in list(part.iterdir()):
        if _UNFINISHED.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    whole = part / WHOLE
    if whole.is_dir() and {file.name for file in whole.iterdir() if not _DATASET.fullmatch(file.name)} == {record}:
        shutil.rmtree(whole)


def _refuse_other_run(written: Path, facts: dict[str, Any]) -> None:
    """Refuse to resume a run with another record."""
    before = _flatten(read_record(written), written)
    for name, here in _flatten(facts, written).items():
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


def _flatten(facts: dict[str, Any], where: Path) -> dict[str, Any]:
    settings = facts.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: settings: expected an object, got {shown(settings)}: delete {where.parent}")
    return {**facts, **settings}


def read_record(file: Path) -> dict[str, Any]:
    """Read the record that a run was started with."""
    try:
        return read_object(file, "an object, the record of a run")
    except ValueError as error:
        raise ValueError(f"{error}: delete {file.parent} and start again") from None


def compute_key(record: Path) -> str:
    """Compute a key of a run's record, for the seals of its parts."""
    facts = {name: value for name, value in read_record(record).items() if name not in (*FREE, *LATER)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_part(file: Path, data: bytes, key: str) -> None:
    """Write a part and, before it, its seal: a part without one was never finished."""
    write_text(_name_seal(file), _compute_seal(file.name, data, key) + "\n")
    write_bytes(file, data)


def read_part(file: Path, key: str) -> bytes | None:
    """Read a finished part; None if it is still to be made. `ValueError`, one line, if its bytes are not those written."""
    if not file.is_file() or not _name_seal(file).is_file():
        return None
    data = file.read_bytes()
    expected = _compute_seal(file.name, data, key).encode()
    with open(
        _name_seal(file), "rb"
    ) as seal_dataset:  # no more than a seal has: somebody else's file may be of any size
        found = seal_dataset.read(len(expected) + 2)
    if found.strip() != expected:
        raise ValueError(
            f"{file} is damaged, or of another run (its SHA-256 is not the recorded one): delete it and resume"
        )
    return data


def seal_line(value: dict[str, Any], key: str) -> str:
    """Format `value` as a line of a JSON-lines file, with its seal."""
    return json.dumps({"sha256": _compute_seal("line", _encode(value), key)} | value, ensure_ascii=False) + "\n"


def open_sealed_line(line: bytes, where: str, key: str) -> dict[str, Any]:
    """Return the value that `seal_line` was given. `ValueError`, one line, if the line is not the one written."""
    try:
        value = parse_json(line, where)
        if isinstance(value, dict) and value.pop("sha256", None) == _compute_seal("line", _encode(value), key):
            return value
    except ValueError:
        pass
    raise ValueError(
        f"{where} is damaged, or of another run (its SHA-256 is not the recorded one): delete it and resume"
    )


def _name_seal(file: Path) -> Path:
    return file.with_name(file.name + SEAL)


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _compute_seal(name: str, data: bytes, key: str) -> str:
    return hashlib.sha256(f"{key}\0{name}\0".encode() + data).hexdigest()


STATE = "state.json"  # of `datasets`: which files hold the rows
BESIDE = (STATE, "dataset_info.json")  # what `datasets` writes beside them; version 0.1.0 did not seal it
AGAIN = "make the dataset again"


def seal_dataset(folder: Path) -> dict[str, str]:
    """`digests` of a dataset that `datasets` has just written, the same for the same rows.

    `datasets` draws the fingerprint, by which it names cached files, at random: it becomes one of the rows' own.
    """
    rows = "".join(_hash_file(file) for file in sorted(folder.glob("*.arrow")))
    state = read_object(folder / STATE) | {"_fingerprint": hashlib.sha256(rows.encode()).hexdigest()[:16]}
    write_text(folder / STATE, json.dumps(state, indent=2) + "\n")
    return hash_files(folder)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a finished dataset that is read again, by its name."""
    files = [*folder.glob("*.arrow"), *(folder / name for name in BESIDE)]
    return {file.name: _hash_file(file) for file in sorted(files)}


def check_files(folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a finished dataset whose files are not those that its record names, or that reads others than these."""
    recorded = facts.get("files")
    if not isinstance(recorded, dict):
        given = "none" if recorded is None else shown(recorded)
        raise ValueError(f"{folder}: files: expected the SHA-256 of each file in the record, got {given}: {AGAIN}")
    for name, digest in recorded.items():
        file = folder / Path(name).name
        if not file.is_file() or _hash_file(file) != digest:
            raise ValueError(f"{file} is damaged (its SHA-256 is not the recorded one): {AGAIN}")
    for name in _list_data_files(folder / STATE):
        if name not in recorded:  # of another folder, it may be
            raise ValueError(f"{folder / STATE} names the file {shown(name)}, which the record does not: {AGAIN}")


def _list_data_files(state: Path) -> list[str]:
    """Return the files that `datasets` would take the rows from."""
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


def _hash_file(file: Path) -> str:
    with open(file, "rb") as data:
        sha = hashlib.sha256()
        while block := data.read(2**20):
            sha.update(block)
    return sha.hexdigest()


Tell = Callable[[float], None]  # what share of a batch is done


def name_shard(number: int, ending: str) -> str:
    """Return the file of a batch of prompts."""
    return f"{number:05d}.{ending}"


def write_shards(
    record: Path, count: int, ending: str, make: Callable[[int, Tell], bytes], processes: Processes, seed: int, device: torch.device
) -> None:  # fmt: skip
    """Have `make(number, tell)` give what is in each of `count` files beside `record` that this process shall write and nobody has written.

    Each has random numbers that depend on `seed` and its number alone, so a run that was killed and gone on with gives the same files. `tell`
    moves the bar by the share of a file that is done.
    """
    key, part, numbers = compute_key(record), record.parent, processes.share(range(count))
    with Bar(len(numbers), "collecting", "batches", quiet=not processes.first) as bar:
        for done, number in enumerate(numbers):
            shard = part / name_shard(number, ending)
            if read_part(shard, key) is not None:
                bar.skip(1)
                continue

            def tell(share: float, done: int = done) -> None:
                bar.to(done + share)

            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed * 1_000_003 + number)
                data = make(number, tell)
            write_part(shard, data, key)
            bar.to(done + 1)
    processes.wait()
