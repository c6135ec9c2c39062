"""Run long jobs that can be killed and resumed: the folder of an unfinished run, its record and its sealed parts.

A part is a file (`write_part`) or a line of a file (`seal_line`). Its seal is a SHA-256 of its content, its name and the run's record, so that a
flipped byte, two swapped files or a file of another run are detected before the parts are used.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ..artifacts.files import check_new, refuse_dangling, write_bytes, write_text
from ..artifacts.json_io import JSONObject, parse_json, read_object
from ..tensors import fork_random
from ..validation import listed, shown
from .processes import ALONE, Lock, Models, Processes, TellUnit


WHOLE = "whole"  # folder within the unfinished run's, in which the dataset is assembled
SEAL = ".sha256"  # suffix of a part's name: the file with its seal
FREE = ("source", "served_at")  # entries of a record that may differ in a resumed run
# Names of parts and their seals, of the folder in which a dataset is assembled, and of its files besides the record.
_PART = re.compile(r"(\d{5,}\.(parquet|jsonl|safetensors)|\d+-\d{6,}\.safetensors)(\.sha256)?|\d{5,}\.part")
_UNFINISHED = re.compile(rf"\.{WHOLE}\.\w{{8}}")
_DATASET = re.compile(r"data-\d+-of-\d+\.arrow|state\.json|dataset_info\.json|README\.md")
LATER = ("found", "files")  # entries that only a finished run has
DAMAGED = "is damaged, or of another run (its SHA-256 is not the recorded one): delete it and resume"


def folders(out: str | Path) -> tuple[Path, Path]:
    """Return the folder of a run's result and that of the unfinished run. Raises: `ValueError`, one line, for a path without a name."""
    out = Path(out)
    if out.name in ("", ".."):
        raise ValueError(f"--out: expected the name of a new folder, got {shown(str(out))}")
    return out, out.with_name(out.name + ".partial")


def prepare(out: Path, part: Path, facts: Mapping[str, object], resume: bool, record: str) -> bool:
    """Create or check the folder of the unfinished run. Returns: True if the run was killed after its last step, so that nothing is left to do.

    `record`: the file with the facts that the run was started with.
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
        if "files" in read_record(written):
            raise ValueError(f"{part} is a finished run, and no unfinished one of {out}: pass another --out")
        _refuse_other_run(written, facts)
    else:
        if part.exists() and not part.is_dir():
            raise ValueError(
                f"{part} is to hold the unfinished run, and it is a file: choose another --out, or move it"
            )
        part.mkdir(parents=True, exist_ok=True)
        others = [file.name for file in part.iterdir() if file.name != f".{record}.part"]
        if others:
            raise ValueError(
                f"{part} is to hold the unfinished run, and it has other files and no {record}: {listed(sorted(others), 5)}; choose "
                "another --out, or move them"
            )
        write_record(written, facts)
    for left in list(part.iterdir()):
        if left.suffix == ".part" and _is_run_file(left, record):
            left.unlink()
    _drop_unfinished(part, record)
    if (part / WHOLE).exists():
        raise ValueError(f"{part / WHOLE} holds files that no run wrote: move them, or delete it")
    return False


@contextmanager
def start_run(
    out: Path,
    part: Path,
    facts: Mapping[str, object],
    record: str,
    *,
    resume: bool = False,
    processes: Processes = ALONE,
) -> Iterator[bool]:
    """Hold the folder `part` of the unfinished run within the context, created or checked by the first of `processes`.

    Args:
        out: the folder of the run's result. facts: what determines the run. record: the file in `part` with `facts`.

    Yields: whether there is anything left to do.

    Raises: `ValueError`, one line, in all processes, if another process is running it, `out` exists, or the unfinished run has other facts.
    """
    lock = Lock(part)
    with processes.connected():
        try:
            processes.on_first(lock.acquire)
            processes.on_first(lambda: prepare(out, part, facts, resume, record))
            yield (part / record).is_file()
        finally:
            lock.release()


def clear(part: Path, record: str) -> None:
    """Remove the folder of a finished run: the files that the run wrote, its record last, then the folder if it is empty."""
    if (part / record).is_file():  # a folder without a record is not a run's
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
    """Return whether a run writes files of this name, or of its temporary form."""
    hidden = file.name.startswith(".") and file.name.endswith(".part")
    name = file.name[1 : -len(".part")] if hidden else file.name
    return (name == record or _PART.fullmatch(name) is not None) and not file.is_dir()


def _drop_unfinished(part: Path, record: str) -> None:
    """Remove the files of a run that was killed while it assembled the dataset."""
    for left in list(part.iterdir()):
        if _UNFINISHED.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)
    whole = part / WHOLE
    if whole.is_dir() and {file.name for file in whole.iterdir() if not _DATASET.fullmatch(file.name)} == {record}:
        shutil.rmtree(whole)


def _refuse_other_run(written: Path, facts: Mapping[str, object]) -> None:
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
                f"{written.parent} was made with other weights of the {role} {before[role]['id']}, under the same name and sizes: use "
                "the same, or delete it"
            )
        raise ValueError(
            f"{written.parent} was made with {name} {shown(there, 300)}, this run has {shown(here, 300)}: use the same, or delete it"
        )


def _flatten(facts: Mapping[str, object], where: Path) -> JSONObject:
    settings = facts.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: settings: expected an object, got {shown(settings)}: delete {where.parent}")
    return {**facts, **settings}


def write_record(file: Path, facts: Mapping[str, object]) -> None:
    """Write the record of a run."""
    write_text(file, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def read_record(file: Path) -> JSONObject:
    """Read the record that a run was started with."""
    try:
        return read_object(file, "an object, the record of a run")
    except ValueError as error:
        raise ValueError(f"{error}: delete {file.parent} and start again") from None


def compute_key(record: Path) -> str:
    """Return a hash of a run's record, which keys the seals of its parts."""
    facts = {name: value for name, value in read_record(record).items() if name not in (*FREE, *LATER)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_part(file: Path, data: bytes, key: str) -> None:
    """Write a part and, before it, its seal: a part without a seal is incomplete."""
    write_text(file.with_name(file.name + SEAL), _compute_seal(file.name, data, key) + "\n")
    write_bytes(file, data)


def read_part(file: Path, key: str) -> bytes | None:
    """Read a finished part; None if it does not exist yet. Raises: `ValueError`, one line, if its bytes were changed."""
    seal = file.with_name(file.name + SEAL)
    if not file.is_file() or not seal.is_file():
        return None
    data = file.read_bytes()
    expected = _compute_seal(file.name, data, key).encode()
    with open(seal, "rb") as lines:  # limited, since a file from elsewhere may have any size
        found = lines.read(len(expected) + 2)
    if found.strip() != expected:
        raise ValueError(f"{file} {DAMAGED}")
    return data


def seal_line(value: Mapping[str, object], key: str) -> str:
    """Return `value` as a line of a JSON-lines file, with its seal."""
    return json.dumps({"sha256": _compute_seal("line", _encode(value), key), **value}, ensure_ascii=False) + "\n"


def open_sealed_line(line: bytes, where: str, key: str) -> JSONObject:
    """Return the value passed to `seal_line`. Raises: `ValueError`, one line, if the line was changed."""
    try:
        value = parse_json(line, where)
        if isinstance(value, dict) and value.pop("sha256", None) == _compute_seal("line", _encode(value), key):
            return value
    except ValueError:
        pass
    raise ValueError(f"{where} {DAMAGED}")


def read_sealed_lines(file: Path, key: str, longest: int) -> Iterator[tuple[str, JSONObject]]:
    """Yield the values in a file of sealed lines, each with its name for errors; remove anything after the last line end.

    Raises: `ValueError`, one line, for a line that was changed, and for one of more than `longest` bytes.
    """
    if not file.is_file():
        raise ValueError(f"{file} is no file: delete it and resume")
    with open(file, "r+b") as lines:
        whole = number = 0
        while line := lines.readline(longest + 1):  # splits at "\n" only: a text may contain other separators
            if len(line) > longest:  # no run wrote it, and the lines after it must not be lost
                raise ValueError(f"{file} has a line of more than {longest} bytes: delete it and resume")
            if not line.endswith(b"\n"):  # the process was killed, or the disk was full, within a line
                lines.truncate(whole)
                return
            whole, number = whole + len(line), number + 1
            where = f"{file}, line {number}"
            yield where, open_sealed_line(line, where, key)


def _encode(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _compute_seal(name: str, data: bytes, key: str) -> str:
    return hashlib.sha256(f"{key}\0{name}\0".encode() + data).hexdigest()


Tell = Callable[[float], None]  # called with the share of a batch that is done


def name_shards(count: int, ending: str) -> list[str]:
    """Return the file names of the batches of prompts."""
    return [f"{number:05d}.{ending}" for number in range(count)]


def write_shards(
    record: Path,
    names: Sequence[str],
    make: Callable[[Models, int, Tell], bytes],
    models: Models,
    processes: Processes,
    seed: int,
    named: tuple[str, str] = ("collecting", "batches"),
) -> None:
    """Write the files `names` beside `record`, except existing ones; `make(models, number, tell)` returns their bytes.

    Random numbers depend only on `seed` and the file's number, so a resumed run gives the same files. `tell` moves the bar within a file.
    """
    key, part = compute_key(record), record.parent
    there = [
        number for number in processes.share(range(len(names))) if read_part(part / names[number], key) is not None
    ]
    done = {number for share in processes.all(there) for number in share}
    todo = [number for number in range(len(names)) if number not in done]

    def write(number: int, data: bytes) -> None:
        write_part(part / names[number], data, key)

    processes.run(partial(_make_shards, make, seed), models, todo, write, named)


def _make_shards(
    make: Callable[[Models, int, Tell], bytes], seed: int, models: Models, numbers: Sequence[int], tell: TellUnit
) -> Iterator[tuple[int, bytes]]:
    device = models[0].device
    for number in numbers:
        with fork_random(device):
            torch.manual_seed(seed * 1_000_003 + number)
            data = make(models, number, partial(tell, number))
        yield number, data
