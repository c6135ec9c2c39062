"""Proves that the package is quick to import, that each public name is there, and that type checkers are told the same."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hf_lossy_assist as hla


SOURCE = Path(hla.__file__)


def test_importing_the_package_loads_no_torch():
    code = "import sys, hf_lossy_assist; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules), hf_lossy_assist.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [hla.__version__]


@pytest.mark.parametrize("name", hla.__all__)
def test_each_public_name_is_there(name):
    assert getattr(hla, name) is not None and name in dir(hla)


def test_type_checkers_see_the_same_names():
    [block] = [node for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen.pop("demo") is None
    assert seen == hla._MODULE and sorted(hla.__all__) == sorted([*seen, "demo"])


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'Topk'"):
        hla.Topk  # noqa: B018
    assert not hasattr(hla, "torch") and inspect.ismodule(hla.demo)


def test_every_module_can_be_imported_first():
    """No module leans on another one having been imported before it."""
    names = [
        ".".join(path.relative_to(SOURCE.parent.parent).with_suffix("").parts) for path in SOURCE.parent.rglob("*.py")
    ]
    names = sorted(
        name.removesuffix(".__init__") for name in names if not name.endswith(("__main__", "custom_generate"))
    )
    code = (
        "import importlib, sys, torch, transformers\n"
        f"for name in {names!r}:\n"
        "    for known in [m for m in sys.modules if m.partition('.')[0] == 'hf_lossy_assist']: del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True)
