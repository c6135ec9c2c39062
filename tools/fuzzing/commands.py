"""The command line in this process: random options and values for every command, and unknown commands and options."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

from hf_lossy_assist import cli

from .made import saved
from .models import VOCAB
from .values import ESCAPE, Random, damaged_text, mutated
from .verdicts import Case, Refused, Wrong


FEW = {
    "--max-new-tokens": "4",
    "--limit": "1",
    "--batch-size": "2",
    "--repeats": "1",
    "--rounds": "3",
    "--sample-batch-size": "2",
}
WRONG = [
    "", " ", "x", "-1", "0", "1", "3", "0.5", "-0.5", "nan", "inf", "1e400", "9" * 30, "9" * 5000, "ü", "a\nb", ESCAPE, "../..", "/", "nowhere",
    "org/name", "org/name@main", "datasets/org/x", "{}", "[]", '{"stop": "svip"}', '{"stop": {"name": "svip", "h": NaN}}', "[red]x[/red]", "strict",
    "cpu", "meta", "cuda:99", "float16", "float64", "true", "x" * 5000, "--help2", "-", "@", "demo", "\udcff", "int8",
]  # fmt: skip
# Valid values of options, besides the numbers and names that are valid for others of the same type.
MEANT = {
    "--policy": ["strict", "svip", "sprinter:threshold=0.2", "autojudge:window=4", "sv", "target", '{"stop": {"name": "constant", "gamma": 2}}'],
    "--dtype": ["float32", "bfloat16", "float16"], "--device": ["cpu", "auto"], "--task": ["demo", "gsm8k", "math", "code"],
    "--kind": ["method", "rule", "stop", "filter", "drafter"], "--for": ["sprinter", "specdec"], "--temperature": ["0.7", "1"], "--top-k": ["0", "5"],
    "--top-p": ["0.9", "1"], "--seed": ["0", "7"], "--gamma": ["1", "2"], "--mix": ["0.3"],
    "--lambda": ["1.2", "3"], "--prompt": ["w1 w2 w3", "w4"], "--head": ["linear", "mlp"], "--max-draft": ["3"], "--shots": ["0", "2"],
    "--features": ["draft", "target", "both"], "--position": ["token", "predicting"], "--folds": ["0", "3"], "--recall": ["0.9"],
    "--width": ["4"], "--weight": ["6"], "--workers": ["1", "2"], "--max-mismatches": ["1"], "--max-seconds": ["5"], "--max-distance": ["0.1"],
    "--timeout": ["0.4"], "--revision": ["main"], "--message": ["m"], "--token": ["hf_x"], "--target-model": ["target"],
}  # fmt: skip


@cache
def commands() -> dict[tuple[str, ...], Any]:
    """Return every command by its words."""
    top: Any = typer.main.get_command(cli.app)
    out: dict[tuple[str, ...], Any] = {}
    for name, command in top.commands.items():
        inside = getattr(command, "commands", None)
        out |= {(name, inner): command for inner, command in inside.items()} if inside else {(name,): command}
    return out


def case(random: Random, folder: Path) -> Case:
    words = random.choice(sorted(commands()))
    arguments = list(words)
    options = {p.opts[0]: p for p in commands()[words].params if p.param_type_name == "option"}
    given: dict[str, Any] = {name: value for name, value in FEW.items() if name in options}
    if "--model" in options and random.random() < 0.85:  # the demo's models are slower to load
        given |= {"--model": str(saved("target")), "--assistant": str(saved("draft"))}
    if "--prompts" in options and random.random() < 0.8:
        given["--prompts"] = str(_prompts(random, folder))
    if "--out" in options:
        given["--out"] = str(folder / "out")
    if words == ("profile",):
        given["--companion"] = str(saved("companion"))
    drawn = sorted(options)
    for name in random.sample(drawn, min(len(drawn), random.choice([0, 1, 1, 2, 4]))):
        given[name] = None if options[name].is_flag else _value(random, name, folder)
    for parameter in commands()[words].params:
        if parameter.param_type_name == "argument" and random.random() < 0.95:
            arguments.append(_argument(random, parameter.name, folder))
    for name, value in given.items():
        if random.random() < 0.97:
            arguments += [name] if value is None else [name, value]
    if random.random() < 0.06:
        arguments.insert(
            random.randrange(len(arguments) + 1),
            random.choice(["--unknown", "extra", "-x", "--max-new-token", "--help", "", "generat"]),
        )
    what = "hf-lossy " + " ".join(repr(a[:80]) if not a.isalnum() else a for a in arguments)
    return Case(what, lambda: _run(arguments, folder))


def _value(random: Random, name: str, folder: Path) -> str:
    if name in MEANT and random.random() < 0.5:
        return random.choice(MEANT[name])
    if name in ("--policy", "--companion", "--model") and random.random() < 0.4:
        return str(saved(random.choice(["head", "judge_head", "profile", "target", "companion"])))
    if name == "--policy" and random.random() < 0.5:
        return json.dumps(mutated(random, {"rule": {"name": "top_k", "k": 2}, "stop": {"name": "svip", "h": 0.3}}))
    if name in ("--data", "--prompts", "--task") and random.random() < 0.6:
        return str(_prompts(random, folder))
    return random.choice(WRONG)


def _argument(random: Random, name: str, folder: Path) -> str:
    if name == "data":
        return random.choice([str(folder), "nowhere", *WRONG])
    if name == "path":
        folders = [saved("head"), saved("target")]
        return random.choice([str(random.choice(folders)), str(folder), *WRONG])
    return random.choice(["org/name", *WRONG])


def _prompts(random: Random, folder: Path) -> Path:
    file = folder / f"prompts{random.choice(['.jsonl', '.json', '.gz', ''])}"
    rows: list[Any] = [{"prompt": f"w{n} w{n + 1} w{VOCAB - 9}", "answer": "w5", "question": "w6 w7"} for n in (1, 20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if random.random() < 0.35:
        row: Any = mutated(random, rows[0])
        text = json.dumps(row) + "\n" + text
    file.write_bytes(damaged_text(random, text) if random.random() < 0.2 else text.encode())
    return file


def _run(arguments: Sequence[str], folder: Path) -> None:
    """Call the real `main` in `folder`; a refusal is code 2 and one line on stderr."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv, here = sys.argv, ["hf-lossy", *arguments], Path.cwd()
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
        os.chdir(here)
    lines = [line for line in err.getvalue().split("\n") if line and "\r" not in line]  # except progress bars
    if code == 2:
        if len(lines) != 1 or not lines[0].startswith("hf-lossy: "):
            raise Wrong(f"code 2 and on stderr {err.getvalue()[-1200:]!r}")
        raise Refused(lines[0])
    if code != 0:
        raise Wrong(f"code {code}, on stderr {err.getvalue()[-300:]!r}")
    _right(arguments, out.getvalue())


def _right(arguments: Sequence[str], out: str) -> None:
    if not out.strip():
        raise Wrong("nothing was printed")
    if "\x1b" in out or "\x07" in out:
        raise Wrong("escape sequences on stdout")
    if "--json" in arguments and "--help" not in arguments:
        try:
            json.loads(out)
        except ValueError:
            raise Wrong(f"--json printed {out[:200]!r}") from None
