"""Every number that a user can pass, in every shape that no sane one has: refused in one line by this package, or it works."""

import math
import typing

import pytest
import torch
from typer.testing import CliRunner

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.cli import app
from hf_lossy_assist.validation import shown


def one_line(error, what):
    """A refusal by this package: one line that names what was wrong."""
    assert isinstance(error, ValueError | TypeError | OSError), f"{what}: {error!r}"
    assert len(str(error).splitlines()) == 1 and len(str(error)) < 400, f"{what}: {str(error)[:300]}"


def commands():
    """(words, function) of every command of `hf-lossy`."""
    for made in app.registered_commands:
        yield [made.name or made.callback.__name__], made.callback
    for group in app.registered_groups:
        for made in group.typer_instance.registered_commands:
            yield [group.name, made.name or made.callback.__name__], made.callback


def options():
    """(words, option, whether it takes a fraction) of every option that takes a number."""
    for words, function in commands():
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            if typing.get_origin(hint) is not typing.Annotated:
                continue
            given, info = typing.get_args(hint)[:2]
            kinds = (
                {given} | set(typing.get_args(given)) | {x for k in typing.get_args(given) for x in typing.get_args(k)}
            )
            if kinds & {int, float}:
                decls = [d for d in (info.default, *(info.param_decls or ())) if str(d).startswith("--")]
                yield words, (decls or ["--" + name.replace("_", "-")])[0], float in kinds


ARGUMENTS = {  # what each command needs, and what an option needs beside it
    "generate": [], "collect": ["--out", "OUT"], "fit sprinter": ["DATA", "--out", "OUT"], "mine": ["--out", "OUT"],
    "fit autojudge": ["DATA", "--out", "OUT"], "fit specdec": ["DATA", "--out", "OUT"], "fit eagle3": ["DATA", "--out", "OUT"],
    "fit dspark": ["DATA", "--out", "OUT"], "profile": ["--out", "OUT"],
    "compare": [], "tune": [],
    "serve": [],
}  # fmt: skip
SAMPLED = ["--temperature", "--top-k", "--top-p"]
BESIDE = {f"{command} {option}": ["--do-sample"] for command in ("generate", "compare", "tune") for option in SAMPLED}
BESIDE["collect --mix"] = ["--for", "specdec"]


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.full)])
def test_every_number_of_the_command_line(quick, tmp_path, monkeypatch):
    """Refused by its name, before a model is loaded or a file is written."""
    monkeypatch.setattr(demo, "load", lambda *_: pytest.fail("models were loaded"))
    there = {"OUT": str(tmp_path / "out"), "DATA": str(tmp_path / "data")}
    for words, option, fraction in options():
        command = " ".join(words)
        if (command == "generate") != quick or option == "--shots":  # of a task, in whose tests it is
            continue
        given = [there.get(x, x) for x in (*words, *ARGUMENTS[command], *BESIDE.get(f"{command} {option}", []))]
        for number in ["1" + "0" * 400, "-1", *(["nan"] if fraction else [])]:
            ran = CliRunner().invoke(app, [*given, f"{option}={number}"])
            one_line(ran.exception, f"{command} {option}={number[:20]}: {ran.output}")
            named = "lam" if option == "--lambda" else option.strip("-").replace("-", "_")
            assert named in str(ran.exception).replace("-", "_").lower(), f"{option}={number[:20]}: {ran.exception}"
        assert not list(tmp_path.iterdir())


def test_what_a_user_is_shown_is_one_short_line():
    class Loud:
        def __repr__(self):
            return "a\nb\x1b[31m"

    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    for value in (
        10**400, 10**5000, math.nan, 1e-320, deep, Loud(), "x" * 10**6, "a\nb", {1: 10**5000}, torch.eye(40), object(),
    ):  # fmt: skip
        assert len(shown(value)) <= 81 and shown(value).isprintable()
    assert shown(10**400) == "a number of 401 digits" and shown(3) == "3" and shown("3") == "'3'"


def nested(parts, level, depth):
    """JSON of stops or rules inside one another, two in each."""
    inner = parts[0]
    for _ in range(depth):
        inner = level(inner, parts[1])
    return inner


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
def test_parts_inside_one_another():
    """Each level asks the next one a few times: what they need is worked out once, or 18 of them take seconds, and 400 never end."""
    for seam, parts, level in (
        ("rule", ("strict", {"name": "top_k", "k": 2}), lambda a, b: {"name": "union", "rules": [a, b]}),
        ("rule", ({"name": "top_k", "k": 2}, None), lambda a, _: {"name": "limited", "rule": a, "per_request": 2}),
        ("stop", ("svip", "constant"), lambda a, b: {"name": "any_of", "stops": [a, b]}),
        ("stop", ("svip", "constant"), lambda a, b: {"name": "all_of", "stops": [b, a]}),
        ("stop", ("svip", None), lambda a, _: {"name": "at_least", "stop": a}),
    ):  # fmt: skip
        assert hla.as_policy({seam: nested(parts, level, 16)}).to_dict()
        for deep in (17, 400):
            with pytest.raises(ValueError, match="inside one another") as error:
                hla.as_policy({seam: nested(parts, level, deep)})
            one_line(error.value, deep)
