"""Mining the demo: a run that nothing disturbs, and what others are compared with it by."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_lossy_assist import demo
from hf_lossy_assist.methods.autojudge import mine as module
from hf_lossy_assist.methods.autojudge.mine import MineSettings, mine, mine_problems
from hf_lossy_assist.methods.autojudge.search import Mined
from hf_lossy_assist.tasks.base import Problem
from hf_lossy_assist.tasks.load import DemoTask


NEW, COUNT = 80, 6
TASK = DemoTask("calibration", 0)
SETTINGS = MineSettings(NEW)
SOURCE = "the demo task, calibration problems of seed 0"


loaded = cache(demo.load)


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
        m, out = loaded(), Path(where.name) / "data"
        how = {"batch_size": COUNT, "source": SOURCE}
        mine(m.target, m.draft, m.tokenizer, TASK, TASK.problems(COUNT), out, SETTINGS, **how)
    return out, sorted(seen, key=lambda one: one.problem), where


def local() -> list[Mined]:
    return undisturbed()[1]
