"""Proves that `hf-lossy policies` names everything that a policy can be made of, and says of each what is so."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from support.rule_cases import CASES

from hf_lossy_assist import as_policy
from hf_lossy_assist.filters import FILTERS
from hf_lossy_assist.registry import KINDS, REQUIRED, Names, find_entry, list_entries
from hf_lossy_assist.rules import RULES
from hf_lossy_assist.stops import STOPS


ENTRIES = {(entry.kind, entry.name): SimpleNamespace(**entry.describe()) for entry in list_entries()}


def test_everything_is_in_it():
    expected = {(kind, name) for kind in KINDS for name in Names(kind)}
    assert {
        ("method", "sv"),
        ("rule", "strict"),
        ("stop", "svip"),
        ("filter", "all"),
        ("drafter", "model"),
    } <= expected
    assert set(ENTRIES) == expected


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda e: f"{e.kind} {e.name}")
def test_each_entry_is_whole(entry):
    assert entry.summary.endswith(".") and len(entry.summary) > 15 and "\n" not in entry.summary
    assert entry.neutral and entry.source and "." not in entry.name
    if entry.kind == "stop":
        assert entry.guarantee == "lossless"
    if entry.kind in ("rule", "stop", "filter"):
        cls = {"rule": RULES, "stop": STOPS, "filter": FILTERS}[entry.kind][entry.name]
        assert list(entry.parameters) == [f.name for f in dataclasses.fields(cls)] and entry.class_name == cls.__name__


@pytest.mark.parametrize("name", [name for name in CASES if name in RULES])
def test_the_guarantee_is_that_of_the_rule(name):
    guarantee = find_entry("rule", name).guarantee
    for rule in CASES[name].ladder:
        assert guarantee == "depends" or rule.lossless == (guarantee == "lossless")


def test_names_without_required_parameters_are_policies():
    for (kind, name), line in ENTRIES.items():
        if kind in ("rule", "stop") and REQUIRED not in line.parameters.values():
            policy = as_policy({kind: name})
            assert type(getattr(policy, kind)).__name__ == line.class_name


def test_the_command(hf_lossy):
    done = hf_lossy("policies", "--json")
    listed = json.loads(done.out)
    assert [(e["kind"], e["name"]) for e in listed] == list(ENTRIES)
    assert all(
        set(e) == {"name", "kind", "class_name", "guarantee", "neutral", "parameters", "source", "summary"}
        for e in listed
    )
    shown = hf_lossy("policies")
    for name in RULES:
        assert name[:8] in shown.out
    only = json.loads(hf_lossy("policies", "--json", "--kind", "filter").out)
    assert {e["name"] for e in only} == set(FILTERS)
    assert "Did you mean 'rule'" in hf_lossy("policies", "--kind", "rules").line


FIELDS = [
    (entry, name)
    for kind in ("rule", "stop", "filter")
    for entry in list_entries(kind)
    for name in getattr(entry.make, "checks", ())
]


@pytest.mark.parametrize(("entry", "name"), FIELDS, ids=lambda value: getattr(value, "name", value))
def test_each_field_is_checked_by_its_annotation(entry, name):
    """Whatever it is a number, a choice or an object of: what is none of them is refused by the field's name."""
    with pytest.raises((TypeError, ValueError), match=rf"{entry.make.__name__}.{name}\b") as error:
        entry.make.checks[name](f"{entry.make.__name__}.{name}", object())
    assert "\n" not in str(error.value)
