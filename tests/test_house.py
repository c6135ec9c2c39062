"""The house's rules that no linter knows: that what is public says what it is, that no path of a maker's stands in it."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_lossy_assist as hla


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


@pytest.mark.full
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


@pytest.mark.full
def test_nothing_names_a_makers_folders():
    """In every file, of weights and figures too: what writes those may put paths into them."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a worktree's .git is a path
    found = [(relative(path), PRIVATE.findall(path.read_bytes())) for path in [*top, *files(*FOLDERS)]]
    assert [(path, paths) for path, paths in found if paths] == []


# -- the package's names ------------------------------------------------------------------------------------------------
SOURCE = Path(hla.__file__)


def test_importing_the_package_loads_no_torch():
    code = "import sys, hf_lossy_assist; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules), hf_lossy_assist.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [hla.__version__]
    with pytest.raises(AttributeError, match="hf_lossy_assist attribute Topk"):
        hla.Topk  # noqa: B018
    assert not hasattr(hla, "torch") and inspect.ismodule(hla.demo)


def test_each_name_is_there_and_stands_once_in_the_stub():
    """One line a name, from the file that defines it: what a new rule adds."""
    tree = ast.parse(SOURCE.with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in lines for alias in node.names]
    assert sorted(names) == sorted(hla.__all__) == sorted(set(names))
    assert set(names) <= set(dir(hla)) and all(getattr(hla, name) is not None for name in names)
    for node in lines:
        if node.module is not None:  # a module
            [alias] = node.names
            public = getattr(hla, alias.name)
            assert alias.asname == alias.name and public.__module__ == f"hf_lossy_assist.{node.module}", alias.name


EACH_FIRST_PATCHING_NOTHING = """
import gc, importlib, sys, torch, transformers
from transformers import GenerationMixin, GenerationConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation import candidate_generator, logits_process, stopping_criteria, utils
watched = (GenerationMixin, GenerationConfig, LlamaForCausalLM, PreTrainedModel, torch.nn.Module,
           candidate_generator, logits_process, stopping_criteria, utils)
before = [dict(vars(x)) for x in watched]
gc.disable()  # it would go through all that torch has again and again
for name in sys.argv[1:]:
    # The last one registers an operator and a precision, once in a process.
    once = ('hf_lossy_assist.models.packed_linears',)
    for known in [m for m in sys.modules if m.partition('.')[0] == 'hf_lossy_assist' and m not in once]: del sys.modules[known]
    importlib.import_module(name)
for x, old in zip(watched, before):
    new = dict(vars(x))
    assert all(new[name] is old[name] for name in old if not name.startswith("_abc")), x
    assert new.keys() == old.keys(), (x, new.keys() ^ old.keys())
print(len(sys.argv) - 1)
"""


@pytest.mark.nightly
def test_every_module_can_be_imported_first_and_patches_nothing():
    """A package is the first that its modules import. Every attribute of the classes that could be patched stays the same object."""
    files = [path.relative_to(SOURCE.parent.parent).with_suffix("") for path in SOURCE.parent.rglob("*.py")]
    names = sorted(".".join(file.parts) for file in files if file.name not in ("__main__", "custom_generate"))
    packages = {name.removesuffix(".__init__") for name in names if name.endswith("__init__")}
    modules = [name for name in names if not name.endswith("__init__")]
    modules += [package for package in packages if not any(name.startswith(package + ".") for name in modules)]
    command = [sys.executable, "-c", EACH_FIRST_PATCHING_NOTHING, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout == f"{len(modules)}\n", done.stderr
