"""Unfinished folders of collect, mine and profile, damaged and resumed; finished datasets, damaged and read."""

import copy
import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from datasets import disable_progress_bars, load_from_disk

from hf_lossy_assist.methods.autojudge import mine as mining
from hf_lossy_assist.methods.autojudge.mining_loop import MineSettings
from hf_lossy_assist.methods.sprinter import collect as collecting
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.methods.sv.collect_samples import STARTED, collect
from hf_lossy_assist.methods.sv.profiled_runner import ProfileSettings
from hf_lossy_assist.tasks.load import ExactTask
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.jobs import describe_run
from hf_lossy_assist.training.resumable import prepare
from hf_lossy_assist.training.verifier_dataset import read_dataset

from .made import home
from .models import pair, tokenizer
from .values import ESCAPE, Random, damaged_bytes, damaged_text, mutated, replaced_file, written
from .verdicts import Case, Wrong


KINDS = ("collect", "mine", "profile", "table")
RECORDS = {"collect": "collect.json", "mine": "mine.json", "profile": "started.json", "table": "collect.json"}
COLLECT = CollectSettings(new_tokens=3, batch_size=1)
MINE = MineSettings(max_new_tokens=4)
PROFILE = ProfileSettings(gamma=(1, 2), new_tokens=6, batch_size=1, batches=(1,), rounds=3)
LINES = [
    b"{}",
    b"[]",
    b"null",
    b"1",
    b"{",
    b"",
    b"\x00",
    b"\xff\xfe",
    b'{"problem": 0}',
    b"[" * 5000,
    b'{"problem": 1e999}',
    ESCAPE.encode(),
]


def start(kind: str, out: Path, resume: bool = False, draft: Any = None) -> None:
    """Run the job into `out`."""
    target, default_draft = pair()
    draft, words = draft or default_draft, ["w1 w2 w3 w4", "w5 w6 w7", "w8 w9 w10 w11"]
    if kind == "collect":
        collecting.collect(
            target, draft, tokenizer(), [PromptText(t) for t in words], out, COLLECT, resume=resume, source="fuzz"
        )
    elif kind == "mine":
        task = ExactTask(problems())
        mining.mine(
            target, draft, tokenizer(), task, task.problems(), out, MINE, batch_size=2, resume=resume, source="fuzz"
        )
    else:
        prepare(
            out,
            _part(out),
            describe_run(
                PROFILE.to_dict(), {"target": target, "draft": draft, "companion": draft}, tokenizer(), words
            ),
            resume,
            STARTED,
        )
        collect(target, draft, draft, tokenizer(), words, PROFILE, _part(out))


def _part(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@cache
def problems() -> Path:
    file = home() / "problems.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"w{n} w{n + 1} w{n + 2}", "answer": "w4"}) + "\n" for n in range(3))
    )
    return file


@cache
def undisturbed(kind: str) -> Path:
    """Return the folder of one whole run before it was finalised ("out.partial"), and its result ("out")."""
    disable_progress_bars()
    folder = home() / "jobs" / kind
    out, backup = folder / "out", folder / "kept"
    folder.mkdir(parents=True)
    if kind == "profile":
        start(kind, out)
        return folder
    module: Any = collecting if kind == "collect" else mining
    assemble = module.assemble

    def copying(*args: Any) -> None:
        shutil.copytree(_part(out), backup)
        assemble(*args)

    module.assemble = copying
    try:
        start(kind, out)
    finally:
        module.assemble = assemble
    backup.rename(_part(out))
    return folder


def case(random: Random, folder: Path) -> Case:
    kind = random.choices(KINDS, (6, 6, 3, 3))[0]
    whole, out = undisturbed("collect" if kind == "table" else kind), folder / "out"
    if kind == "table":
        shutil.copytree(whole / "out", out)
        what = _damage(random, out, RECORDS[kind])
        return Case(f"a dataset of collect: {what}", lambda: _read(out, whole / "out"))
    part = Path(shutil.copytree(_part(whole / "out"), _part(out)))
    other = random.random() < 0.1
    what = "of another draft" if other else _damage(random, part, RECORDS[kind])
    draft = _other_draft() if other else None
    return Case(f"{kind}: {what}", lambda: _resume(kind, out, whole / "out", draft))


@cache
def _other_draft() -> Any:
    """Return a draft of the same name and sizes with other weights."""
    draft = copy.deepcopy(pair()[1])
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(
                0.3 * weight.std(correction=0) * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
            )
    return draft


def _damage(random: Random, folder: Path, record: str) -> str:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    how = random.choice(["record", "record", "bytes", "bytes", "swap", "line", "line", "file", "more", "missing"])
    shards = [file for file in files if file.name != record]
    file = random.choice(shards)
    if how == "record":
        file = folder / record
        text = file.read_text(encoding="utf-8")
        if random.random() < 0.5:
            file.write_bytes(damaged_text(random, text))
            return f"{record}: text"
        spec = mutated(random, json.loads(text))
        if random.random() < 0.2:
            spec = []
        file.write_text(written(spec))
        return f"{record}: {written(spec)[:200]}"
    if how == "bytes":
        file.write_bytes(damaged_bytes(random, file.read_bytes()))
    elif how == "swap" and len(shards) > 1:
        other = random.choice([f for f in shards if f is not file])
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
        return f"{file.name} and {other.name} change places"
    elif how == "line" and any(f.suffix == ".jsonl" for f in shards):
        file = next(f for f in shards if f.suffix == ".jsonl")
        return f"{file.name}: {_damaged_line(random, file)}"
    elif how == "file":
        return f"{file.name}: {replaced_file(random, file)}"
    elif how == "more":
        extra = folder / random.choice(
            ["00009.parquet", "x.parquet", "00007.jsonl", "9-000000.safetensors", "whole", "x.part", "x"]
        )
        if extra.name == "whole":
            extra.mkdir()
        else:
            extra.write_bytes(random.choice([b"", b"x\n", b"{}\n", file.read_bytes()]))
        return f"{extra.name} beside them"
    elif how == "missing":
        file.unlink()
    return f"{file.name}: {how}"


def _damaged_line(random: Random, file: Path) -> str:
    lines = file.read_bytes().split(b"\n")[:-1]
    at, how = random.randrange(len(lines)), random.choice(["other", "entry", "problem", "twice", "cut", "order"])
    if how == "other":
        lines[at] = random.choice(LINES)
    elif how == "entry":
        lines[at] = written(mutated(random, json.loads(lines[at]))).encode()
    elif how == "problem":
        lines[at] = json.dumps(
            json.loads(lines[at]) | {"problem": random.choice([999, -1, 10**30, "0", None, 0.5, True])}
        ).encode()
    elif how == "twice":
        lines.append(lines[at])
    elif how == "order":
        lines.reverse()
    file.write_bytes(b"".join(line + b"\n" for line in lines)[: -5 if how == "cut" else None])
    return f"line {at} {how}: {lines[at][:150]!r}"


def _resume(kind: str, out: Path, whole: Path, draft: Any) -> None:
    start(kind, out, True, draft)
    if draft is not None:
        raise Wrong("went on with another model's work")
    if kind == "profile":
        _same_samples(_part(out), _part(whole))
    else:
        _same_rows(out, whole)


def _same_rows(out: Path, whole: Path) -> None:
    if load_from_disk(str(out)).to_list() != load_from_disk(str(whole)).to_list():
        raise Wrong("another dataset than that of an undisturbed run")
    if (out / "README.md").read_text() != (whole / "README.md").read_text():
        raise Wrong("another card than that of an undisturbed run")


def _same_samples(part: Path, whole: Path) -> None:
    for file in sorted(whole.glob("*.safetensors")):
        one, other = (safetensors.numpy.load((folder / file.name).read_bytes()) for folder in (part, whole))
        if one.keys() != other.keys() or any((one[name] != other[name]).any() for name in one):
            raise Wrong(f"{file.name}: other samples than those of an undisturbed run")


def _read(out: Path, whole: Path) -> None:
    table, right = read_dataset(out), read_dataset(whole)
    for field in dataclasses.fields(right):
        one, other = getattr(table, field.name), getattr(right, field.name)
        same = one.shape == other.shape and bool((one == other).all()) if hasattr(one, "shape") else one == other
        if not same and field.name != "facts":
            raise Wrong(f"other {field.name} than were written")
