"""Every number that a user can pass, in every shape that no sane one has: refused in one line by this package, or it works."""

import inspect
import math
import typing

import numpy as np
import pytest
import refused
import torch
from support import small
from typer.testing import CliRunner

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.cli import app
from hf_lossy_assist.validation import shown


NUMBERS = {
    "0": 0, "-1": -1, "NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "2**31": 2**31, "10**20": 10**20, "10**30": 10**30,
    "10**400": 10**400, "10**5000": 10**5000, "1e308": 1e308, "1e-320": 1e-320, "1.5": 1.5, "True": True, "'3'": "3",
}  # fmt: skip
OTHERS = {
    "None": None, "[]": [], "list": [10**5000], "dict": {}, "tensor": torch.eye(30), "array": np.zeros((30, 30)),
    "model": small.llama(layers=1), "object": object(),
}  # fmt: skip
VALUES = NUMBERS | OTHERS
REFUSED_BY_ALL = ("-1", "10**30", "10**400", "10**5000", "'3'")  # of whole numbers


def one_line(error, what):
    assert refused.fault(error) is None, f"{what}: {refused.fault(error)}: {type(error).__name__}: {str(error)[:300]}"
    assert len(str(error)) < 400, f"{what}: {len(str(error))} characters"


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
BESIDE = {
    "collect --mix": ["--for", "specdec"],
    "mine --shots": ["--task", "gsm8k", "--data", "DATA"],
} | {f"{command} {option}": ["--do-sample"] for command in ("generate", "compare", "tune") for option in ("--temperature", "--top-k", "--top-p")}  # fmt: skip


@pytest.mark.full(every=18)
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize(("words", "option", "fraction"), list(options()), ids=str)
def test_every_number_of_the_command_line(words, option, fraction, tmp_path, monkeypatch):
    """Refused by its name, before a model is loaded or a file is written."""
    monkeypatch.setattr(demo, "load", lambda *_: pytest.fail("models were loaded"))
    command = " ".join(words)
    there = {"OUT": str(tmp_path / "out"), "DATA": str(tmp_path / "data")}
    given = [there.get(x, x) for x in (*words, *ARGUMENTS[command], *BESIDE.get(f"{command} {option}", []))]
    for number in ["1" + "0" * 30, "1" + "0" * 400, "-1", *(["nan", "-inf"] if fraction else [])]:
        ran = CliRunner().invoke(app, [*given, f"{option}={number}"])
        one_line(ran.exception, f"{command} {option}={number[:20]}: {ran.output}")
        named = "lam" if option == "--lambda" else option.strip("-").replace("-", "_")
        assert named in str(ran.exception).replace("-", "_").lower(), f"{option}={number[:20]}: {ran.exception}"
    assert not list(tmp_path.iterdir())


def test_what_a_user_is_shown_is_one_short_line():
    for value in (*VALUES.values(), "a" * 10**6, "a\nb", {1: 10**5000}):
        assert len(shown(value)) <= 81 and "\n" not in shown(value)
    assert shown(10**400) == "a number of 401 digits" and shown(3) == "3" and shown("3") == "'3'"
    assert inspect.signature(shown).parameters["longest"].default == 80


def nested(parts, level, depth):
    """JSON of stops or rules inside one another, two in each."""
    inner = parts[0]
    for _ in range(depth):
        inner = level(inner, parts[1])
    return inner


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.parametrize("deep", [16, 17, 18, 400])
@pytest.mark.parametrize(
    ("seam", "parts", "level"),
    [
        ("rule", ("strict", {"name": "top_k", "k": 2}), lambda a, b: {"name": "union", "rules": [a, b]}),
        ("rule", ({"name": "top_k", "k": 2}, None), lambda a, _: {"name": "limited", "rule": a, "per_request": 2}),
        ("stop", ("svip", "constant"), lambda a, b: {"name": "any_of", "stops": [a, b]}),
        ("stop", ("svip", "constant"), lambda a, b: {"name": "all_of", "stops": [b, a]}),
        ("stop", ("svip", None), lambda a, _: {"name": "at_least", "stop": a}),
    ],
    ids=["union", "limited", "any_of", "all_of", "at_least"],
)
def test_parts_inside_one_another(seam, parts, level, deep):
    """Each level asks the next one a few times: what they need is worked out once, or 18 of them take seconds, and 400 never end."""
    spec = {seam: nested(parts, level, deep)}
    if deep == 16:
        assert hla.as_policy(spec).to_dict()
        return
    error = refused.refusal(lambda: hla.as_policy(spec))
    one_line(error, deep)
    assert "inside one another" in str(error)
