"""The house's rules that no linter knows: how long a file may be, that what is public says what it is, that no path of a maker's stands in it."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import hf_lossy_assist as hla


ROOT = Path(__file__).parent.parent
FOLDERS = ("hf_lossy_assist", "benchmarks", "examples", "tools", "docs", "hub_cards", "tests", ".ci")

CODE, TEST = 350, 500  # lines
# Longer ones, with the length that each may not pass again: a row is lowered with its file and goes when the file is short enough.
LONGER: dict[str, int] = {}

# Homes on Linux, macOS and Windows, and where this repository was checked out.
PRIVATE = re.compile(rb"(?<![\w.~}-])/(?:home|Users|root|work)/[\w.]|[A-Za-z]:\\{1,2}Users\\")


def files(*folders: str, ending: str = "") -> list[Path]:
    """What is committed, and what is about to be: caches apart, everything in the folders."""
    found = [path for folder in folders for path in (ROOT / folder).rglob(f"*{ending}") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long(paths: list[Path], most: int) -> list[str]:
    """One line for each file that is longer than it may be."""
    limits = {path: LONGER.get(relative(path), most) for path in paths}
    return [
        f"{relative(path)}: {length(path)} lines, at most {limit}: split it by purpose"
        for path, limit in limits.items()
        if length(path) > limit
    ]


def test_no_file_is_too_long():
    code = files("hf_lossy_assist", "benchmarks", "examples", "tools", ending=".py")
    tests = files("tests", ending=".py")
    assert len(code) > 100 and len(tests) > 100  # else the folders are elsewhere, and nothing was measured
    assert too_long(code, CODE) + too_long(tests, TEST) == []


def test_no_two_test_files_have_one_name():
    """pytest imports them by it, and collects nothing where two have the same."""
    names = [path.name for path in files("tests", ending=".py") if path.name.startswith("test_")]
    assert len(names) > 100 and sorted(set(names)) == sorted(names)


def test_a_long_file_is_listed_only_while_it_is_long():
    for path, lines in LONGER.items():
        assert (ROOT / path).exists(), f"{path} is gone: take its row out of LONGER"
        shortest = TEST if path.startswith("tests/") else CODE
        assert length(ROOT / path) > shortest, f"{path} is short enough: take its row out of LONGER"
        assert length(ROOT / path) == lines, f"{path} has {length(ROOT / path)} lines: write that into LONGER"


def test_a_file_that_grew_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(LONGER, "known.py", 3)
    for name, lines in (("known.py", 3), ("short.py", 2), ("long.py", 4)):
        (tmp_path / name).write_text("#\n" * lines, encoding="utf-8")
    paths = files(".", ending=".py")
    assert too_long(paths, 3) == ["long.py: 4 lines, at most 3: split it by purpose"]
    (tmp_path / "known.py").write_text("#\n" * 4, encoding="utf-8")
    assert len(too_long(paths, 3)) == 2


@pytest.mark.parametrize("name", hla.__all__)
def test_each_public_name_says_what_it_is(name):
    """In words of its own: neither a base's nor the signature that `dataclass` writes."""
    its = getattr(hla, name)
    says = vars(its).get("__doc__") if inspect.isclass(its) else its.__doc__
    assert says and says.strip() and not says.startswith(f"{name}("), f"{name} has no docstring"


@pytest.mark.full
def test_each_module_says_what_it_is_for():
    modules = files("hf_lossy_assist", "benchmarks", "examples", "tools", "tests", ending=".py")
    assert [relative(path) for path in modules if not ast.get_docstring(ast.parse(path.read_bytes()))] == []


def test_nothing_names_a_makers_folders():
    """In every file, of weights and figures too: what writes those may put paths into them."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a worktree's .git is a path
    found = [(relative(path), PRIVATE.findall(path.read_bytes())) for path in [*top, *files(*FOLDERS)]]
    assert [(path, paths) for path, paths in found if paths] == []


@pytest.mark.parametrize(
    "text",
    ["see {}home/ada/data.jsonl", '"{}Users/ada/models"', "cd {}work/main", "C:{0}Users{0}ada", "={}root/.cache"],
)
def test_a_makers_folder_is_found(text):
    assert PRIVATE.search(text.format("\\" if text.startswith("C") else "/").encode())


@pytest.mark.parametrize("text", ["https://example.org{}home/page", "~{}work/data", "a{}work/of", "the{}root of"])
def test_an_address_is_no_makers_folder(text):
    assert not PRIVATE.search(text.format("/").encode())
