"""The house's rules that no linter knows: that what is public says what it is, that no path of a maker's stands in it."""

import ast
import re
from pathlib import Path


ROOT = Path(__file__).parent.parent
FOLDERS = ("hf_lossy_assist", "benchmarks", "examples", "tools", "docs", "hub_cards", "tests", ".ci")

# Homes on Linux, macOS and Windows, and where this repository was checked out.
PRIVATE = re.compile(rb"(?<![\w.~}-])/(?:home|Users|root|work)/[\w.]|[A-Za-z]:\\{1,2}Users\\")


def files(*folders: str, ending: str = "") -> list[Path]:
    """Return the files that are committed or about to be: everything in the folders but caches."""
    found = [path for folder in folders for path in (ROOT / folder).rglob(f"*{ending}") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_nothing_is_a_client_of_a_server():
    """The Hub's own client aside; one file listens, and one sees whether a cluster's address answers."""
    clients = {"requests", "httpx", "httpx2", "aiohttp", "openai", "urllib", "http", "socket"}
    for file in files("hf_lossy_assist", ending=".py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            allowed = (
                {"urllib.parse", "http", "socket"} if file.name in ("http.py", "cluster.py") else {"urllib.parse"}
            )
            names = [name for name in names if name not in allowed and not name.startswith("openai.types")]
            assert not {name.partition(".")[0] for name in names} & clients, file


def test_nothing_names_a_makers_folders():
    """In every file, of weights and figures too: what writes those may put paths into them."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a worktree's .git is a path
    found = [(relative(path), PRIVATE.findall(path.read_bytes())) for path in [*top, *files(*FOLDERS)]]
    assert [(path, paths) for path, paths in found if paths] == []
