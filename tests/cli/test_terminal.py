"""Text of models, files and servers is shown as text: no terminal acts on it, and rich takes none of it for its markup."""

import ast
import json
import math
import sys
import warnings
from pathlib import Path

import pytest

import hf_lossy_assist as hla
from hf_lossy_assist import HeadConfig, LinearHead
from hf_lossy_assist.artifacts.identity import ModelIdentity
from hf_lossy_assist.policy.sharing import detect_kind
from hf_lossy_assist.terminal import console, plain_warnings, show, show_json
from hf_lossy_assist.validation import listed, one_line, visible


PACKAGE = Path(hla.__file__).parent
WILD = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\x7f\u202eeno"  # sets a title, a colour, clears the screen, turns the text around
ACTS = ("\x1b", "\x07", "\x9b", "\r", "\x7f", "\u202e")


def quiet(text: str) -> bool:
    return not any(c in text for c in ACTS)


def test_text_stays_as_it_is(capsys):
    for text in (
        "plain\n\ttext", "日本語　全角", "👩‍👩‍👧", "שלום", "e\u0301 ñ", "\u00a0\u2009", "a\\x1b", "[red]x[/red]", ":smile:",
    ):  # fmt: skip
        assert visible(text) == text
        show(text)
        console(soft_wrap=True, highlight=False).print(text)
        assert capsys.readouterr().out == f"{text}\n{text.expandtabs()}\n"  # rich makes blanks of tabs


def test_what_a_terminal_acts_on_is_written_out(capsys):
    assert visible(WILD) == r"\x1b]0;title\x07\x1b[31mred\x9b2J\r\x7f\u202eeno"
    assert visible("a\r\nb\ud800") == "a\nb\\ud800"
    show(WILD, file=sys.stderr)
    show("a", Path("b"))
    show_json({WILD: [WILD]})
    screen = console(force_terminal=True, width=200, highlight=False)
    screen.print(WILD + "[link=http://x]a[/link]", style="red")
    shown = capsys.readouterr()
    assert quiet(shown.err) and shown.out.startswith("a b\n")
    given, _, rich = shown.out.removeprefix("a b\n").partition("\n")
    assert quiet(given) and json.loads(given) == {WILD: [WILD]}
    assert "[link=http://x]a[/link]" in rich and "\\x1b]0;title" in rich
    assert set(rich.replace("\n", "").split("\x1b[")[1:]) and "\x07" not in rich and "\x9b" not in rich
    show_json({"threshold": math.inf, "a": [-math.inf, (math.nan, 0.5)]})
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"threshold": "inf", "a": ["-inf", ["nan", 0.5]]}


def test_a_warning_has_an_end(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with plain_warnings():
            warnings.warn("x\x1b\n" * 10**6, stacklevel=1)
    shown = capsys.readouterr().err
    assert shown.startswith("warning: x") and len(shown) < 1100 and shown.count("\n") == 1 and quiet(shown)
    assert len(listed(["y\x1b" * 10**6] * 3)) < 1000


@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
def test_generate_shows_prompts_paths_and_texts_as_text(hf_lossy, tmp_path):
    prompt = f"1 + 1 {WILD} [bold]b[/bold] [/nothing]"
    policy = tmp_path / "[red]p[blink]"
    policy.mkdir()
    (policy / "policy.json").write_text('{"stop": "svip"}')
    options = ("--prompt", prompt, "--max-new-tokens", 4, "--policy", policy)
    done = hf_lossy("generate", *options)
    assert done.code == 0, done.err
    assert quiet(done.out) and f"policy {policy}"[:60] in done.out.replace("\n", "")
    assert "[bold]b[/bold] [/nothing]" in done.out
    as_json = hf_lossy("generate", *options, "--json")
    assert quiet(as_json.out) and as_json.json["outputs"][0]["prompt"] == prompt


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_warnings_of_a_command_are_one_line(hf_lossy, tmp_path):
    LinearHead(HeadConfig(48)).save_pretrained(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {f"new{WILD}\nentry": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = hf_lossy("generate", "--policy", f"sprinter:head={tmp_path / 'head'}", "--max-new-tokens", 2)
    [line] = [line for line in done.err.splitlines() if "entries not known" in line]
    assert line.startswith("warning: ") and quiet(line) and "\\x1b" in line and "site-packages" not in done.err
    LinearHead(HeadConfig(4)).save_pretrained(tmp_path / "head")  # of another size, and of no named models
    done = hf_lossy("generate", "--policy", f"sprinter:head={tmp_path / 'head'}", "--max-new-tokens", 2)
    assert done.code == 2 and "Traceback" not in done.err
    assert "shapes" in done.err.splitlines()[-1] and done.err.splitlines()[-1].startswith("hf-lossy: ")


def test_names_from_outside_are_listed_in_one_line(tmp_path):
    (tmp_path / f"a{WILD.replace('/', '')}\nb").write_text("")
    deep = tmp_path / "a" / "b" / "model.safetensors"  # too deep: a search of everything below could go through a disk
    deep.parent.mkdir(parents=True)
    deep.write_bytes(b"")
    with pytest.raises(ValueError, match="is no folder of a head") as error:
        detect_kind(tmp_path)
    assert quiet(str(error.value)) and "\n" not in str(error.value)
    shown = str(ModelIdentity(f"org/{WILD}\nx", None, WILD, 1, 1, 1))
    assert quiet(shown) and "\n" not in shown
    assert listed(range(30), 3) == "0, 1, 2 and 27 more"
    assert quiet(one_line(WILD)) and "\n" not in one_line("a\nb")


@pytest.mark.full
def test_nothing_else_in_the_package_writes_to_the_terminal():
    allowed = {"terminal.py", "_runs.py"}  # the latter's one line has a rule of its own: test_cli.py
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name in allowed:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "typer.echo", "typer.secho", "Console", "rich.print", "TextStreamer"), (
                    file
                )
                assert not called.startswith(("sys.stdout.write", "sys.stderr.write")), file
            if isinstance(node, ast.ImportFrom):
                assert not {"Console"} & {alias.name for alias in node.names}, file
