"""Proves when names are read: this package's own before anybody else's, those of entry points at the first look-up, and what fails again and again."""

import dataclasses
import importlib
import subprocess
import sys

import pytest
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import registry
from hf_lossy_assist.registry import register_rule
from hf_lossy_assist.rules import RULES


@dataclasses.dataclass(frozen=True)
class Half(hla.TopK):
    """A rule of one's own."""


class Point:
    """An entry point that does what it is given, once it is loaded."""

    name, value = "mine", "my_package.rules"

    def __init__(self, load):
        self.load = load


@pytest.fixture
def plugins(monkeypatch):
    """Whatever these entry points register, as if no name had been looked up before."""

    def installed(*loads):
        points = [Point(load) for load in loads]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "hf_lossy_assist" else [])
        registry.LOADED.discard(registry.PLUGINS)

    yield installed
    registry.LOADED.add(registry.PLUGINS)


def half_again():
    register_rule("half", Half, guarantee="lossy", neutral={"k": 1}, summary="For a test.")
    assert RULES["half"] is Half  # a plugin may look names up while it is imported


def test_entry_points_bring_names_along_that_may_be_given_up(plugins):
    """A package of one's own is imported when a name is first looked up, so the command line knows its rules."""
    plugins(half_again)
    try:
        assert RULES["half"] is Half
    finally:
        registry.forget("rule", "half")
    register_rule("half", hla.TopK, neutral={"k": 1})
    plugins(half_again)
    for _ in range(2):
        refused(lambda: hla.as_policy("svip"), "mine = .*'half' is the name of .*forget", ImportError)
    registry.forget("rule", "half")
    assert RULES["half"] is Half
    registry.forget("rule", "half")


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)])
def test_a_broken_entry_point_is_named_by_every_look_up(plugins, error):
    def broken():
        raise error

    plugins(broken)
    line = f"entry point mine = my_package.rules of .*{type(error).__name__}: {error}; mend its package, or uninstall"
    for _ in range(2):
        for look_up in (lambda: hla.as_policy("svip"), lambda: list(RULES), lambda: registry.list_entries("stop")):
            refused(look_up, line, ImportError)


def test_a_module_that_fails_halfway_is_read_once_more(plugins, tmp_path, monkeypatch):
    """Names that it registered before it failed are registered again."""
    module = tmp_path / "halfway.py"
    rule = """
from dataclasses import dataclass
import hf_lossy_assist as hla
@dataclass(frozen=True)
class Halfway(hla.Strict): pass
hla.register_rule("halfway", Halfway, guarantee="lossless", summary="For a test.")
"""
    module.write_text(f"{rule}raise OSError('no table')")
    monkeypatch.syspath_prepend(tmp_path)
    plugins(lambda: importlib.import_module("halfway"))
    for _ in range(2):
        refused(lambda: list(RULES), "OSError: no table", ImportError)
    module.write_text(rule + "# whole\n")
    importlib.invalidate_caches()
    try:
        assert str(hla.as_policy("halfway")) == '{"rule": {"name": "halfway"}}'
    finally:
        registry.forget("rule", "halfway")


FIRST = """
import sys
import hf_lossy_assist as hla
from hf_lossy_assist import registry

def own(h=0.3): return hla.LossyPolicy(stop=hla.SVIP(h))

sys.modules["hf_lossy_assist.rules.thresholds"] = None  # a room that cannot be read, for now
for _ in range(2):
    try: registry.list_entries("rule")
    except ImportError as error: assert "thresholds" in str(error)
    else: raise AssertionError("read")
del sys.modules["hf_lossy_assist.rules.thresholds"]
for recipe in (own, hla.svip):
    try: hla.register_method("sprinter", recipe=recipe, guarantee="lossless", summary="Mine.")
    except ValueError as error: assert "'sprinter' is the name of hf_lossy_assist" in str(error)
    else: raise AssertionError("taken")
for name in ("svip", "typical", "heuristic"): hla.as_policy(name)
print([method.name for method in registry.list_entries("method")])
"""


@pytest.mark.nightly
def test_the_first_registration_takes_no_name_of_this_package():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=200)
    assert "'sprinter', 'autojudge', 'specdec', 'sv'" in done.stdout, done.stderr
