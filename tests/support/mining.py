"""Mining the demo: a run that nothing disturbs, and what others are compared with it by."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge import mine as module
from hf_lossy_assist.methods.autojudge.dataset import RECORD
from hf_lossy_assist.methods.autojudge.mine import MineSettings, mine, mine_problems
from hf_lossy_assist.methods.autojudge.search import Mined
from hf_lossy_assist.tasks.base import Problem
from hf_lossy_assist.tasks.load import DemoTask


NEW, COUNT = 80, 6
TASK = DemoTask("calibration", 0)
SETTINGS = MineSettings(NEW)
SOURCE = "the demo task, calibration problems of seed 0"


@cache
def loaded() -> demo.Demo:
    return demo.load()


def found(target: Any, problems: list[Problem], settings: MineSettings = SETTINGS, **options: Any) -> list[Mined]:
    """Mine the demo's problems; return what is found, by problem."""
    m = loaded()
    task = options.pop("task", TASK)
    out = mine_problems(target or m.target, m.draft, m.tokenizer, task, problems, settings, **options)
    return sorted(out, key=lambda one: one.problem)


@cache
def undisturbed() -> tuple[Path, list[Mined], tempfile.TemporaryDirectory]:
    """A whole run of `mine`: its dataset, and what went into it."""
    where, seen = tempfile.TemporaryDirectory(), []

    def tee(*args: Any, **options: Any) -> Iterator[Mined]:
        for one in mine_problems(*args, **options):
            seen.append(one)
            yield one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mine_problems", tee)
        out = mine_demo(Path(where.name) / "data")
    return out, sorted(seen, key=lambda one: one.problem), where


def local() -> list[Mined]:
    return undisturbed()[1]


def mine_demo(out: Path, count: int = COUNT, settings: MineSettings = SETTINGS, **options: Any) -> Path:
    m = loaded()
    options = {"batch_size": COUNT, "source": SOURCE} | options
    return mine(m.target, m.draft, m.tokenizer, TASK, TASK.problems(count), out, settings, **options)


def same_dataset(a: Path, b: Path) -> bool:
    assert {p.name for p in a.iterdir()} == {p.name for p in b.iterdir()}
    return (
        load_from_disk(str(a)).to_list() == load_from_disk(str(b)).to_list()
        and all((a / name).read_text() == (b / name).read_text() for name in ("README.md", RECORD))
    )  # fmt: skip
