"""Policies as JSON, files, folders and objects: every registered rule, stop and filter with changed parameters, nested and damaged."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hf_lossy_assist as hla
from hf_lossy_assist.filters import FILTERS
from hf_lossy_assist.policy.parse import as_policy
from hf_lossy_assist.rules import RULES
from hf_lossy_assist.stops import STOPS

from .made import saved
from .models import checked, prompts, short
from .values import Random, damaged_text, junk, mutated, shown, written
from .verdicts import Case, Wrong


SEAMS: dict[str, Mapping[str, Any]] = {"rule": RULES, "stop": STOPS, "filter": FILTERS}
# A value of each parameter that has no default, or whose default says too little.
PARAMETERS: dict[str, list[Any]] = {
    "lenience": [0.5], "k": [1, 4], "budget": [0.1], "weight": [0.3], "alpha": [0.2], "step": [0.1], "rate": [None, 0.5],
    "table": [[[1, 3], [2, 5]], {"1": 4}], "inside": [None, [5, 6]], "never": [[], [7]], "per_request": [None, 3], "n": [2],
}  # fmt: skip


def draw_spec(random: Random, seam: str, depth: int = 0) -> Any:
    """Return a random valid entry of a policy's JSON form."""
    name = random.choice(list(SEAMS[seam]))
    out: dict[str, Any] = {"name": name}
    for field in dataclasses.fields(SEAMS[seam][name]):
        if field.name == seam:
            out[seam] = draw_spec(random, seam, depth + 1) if depth < 3 else next(iter(SEAMS[seam]))
        elif field.name == f"{seam}s":
            out[field.name] = [
                draw_spec(random, seam, depth + 1) if depth < 2 else "strict" for _ in range(random.randint(1, 3))
            ]
        elif field.name in ("head", "profile", "companion"):
            out[field.name] = str(saved(f"judge_{field.name}" if name == "judge" else field.name))
        elif field.name in PARAMETERS:
            out[field.name] = random.choice(PARAMETERS[field.name])
        elif field.default is not dataclasses.MISSING and random.random() < 0.4:
            out[field.name] = field.default
    return name if len(out) == 1 and random.random() < 0.5 else out


def draw_policy(random: Random) -> dict[str, Any]:
    return {seam: draw_spec(random, seam) for seam in SEAMS if random.random() < (0.6 if seam != "filter" else 0.15)}


def case(random: Random, folder: Path) -> Case:
    spec: Any = draw_policy(random)
    if random.random() < 0.75:
        spec = mutated(random, spec)
    ways = {"dict": 8, "text": 8, "folder": 8, "object": 10, "part": 4, "deep": 3, "huge": 1}
    how = random.choices(list(ways), list(ways.values()))[0]
    given: Any = spec
    if how == "deep":
        given, how = _deep(random), random.choice(["dict", "text"])
    elif how == "part":
        given = junk(random)()
    elif how == "object":
        return _object(random)
    elif how == "huge":
        given, file = folder, folder / "policy.json"
        file.write_text(json.dumps({"stop": "svip"}))
        with open(file, "r+b") as large:
            large.truncate(2**29)  # nothing on the disk, all of it in memory if it is read
    what = f"policy as {how}: {shown(given) if how in ('part', 'dict') else str(given)[:300]}"
    if how in ("text", "folder"):
        text = written(given)
        data = damaged_text(random, text) if random.random() < 0.3 else text.encode()
        what = f"policy as {how}: {data[:400]!r}"
        if how == "text":
            given = data.decode("utf-8", "replace")
            given = given if given.lstrip().startswith("{") else "{" + given
        else:
            (folder / "policy.json").write_bytes(data)
            given = random.choice([str, Path])(folder)
    inputs, sampling = prompts(random, random.choice([1, 2])), random.random() < 0.3
    return Case(what, lambda: _read(given, inputs, sampling))


def _deep(random: Random) -> Any:
    depth, kind = (
        random.choice([5, 30, 300]),
        random.choice(["union", "limited", "any_of", "at_least", "fallback", "stop"]),
    )
    seam = "rule" if kind in ("union", "limited") else "stop"
    spec: Any = "strict" if seam == "rule" else "svip"
    for _ in range(depth):
        inside = {f"{seam}s": [spec]} if kind in ("union", "any_of") else {seam: spec}
        spec = {"name": kind} | inside if kind != "stop" else {"stop": spec}
    return {seam: spec}


def _object(random: Random) -> Case:
    """Return a part built in Python, with one or two of its parameters set to an invalid value."""
    part = random.choice([p for known in SEAMS.values() for p in known.values()])
    given: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        if field.default is dataclasses.MISSING or random.random() < 0.5:
            given[field.name] = random.choice([*PARAMETERS.get(field.name, ()), junk(random)(), junk(random)()])
    what = f"{part.__name__}({', '.join(f'{name}={shown(value)}' for name, value in given.items())})"
    inputs, sampling = prompts(random, random.choice([1, 2])), random.random() < 0.3
    return Case(what, lambda: _read(part(**given), inputs, sampling))


def _read(given: Any, inputs: dict[str, Any], sampling: bool) -> None:
    """Check that an accepted policy decodes, and that its JSON form reads back to an equal one."""
    policy = as_policy(given)
    if not isinstance(policy, hla.LossyPolicy):
        raise Wrong(f"as_policy gave a {type(policy).__name__}")
    if len(str(policy).splitlines()) != 1:
        raise Wrong("its name has several lines")
    again = as_policy(json.dumps(policy.to_dict()) if policy.to_dict() else {})
    if again != policy or hash(again) != hash(policy):
        raise Wrong(f"its JSON form reads back to another policy: {policy.to_dict()}"[:400])
    checked(
        "llama",
        lambda: (
            {"lossy_policy": policy, "max_new_tokens": 8, "do_sample": sampling, "stopping_criteria": short()} | inputs
        ),
    )
