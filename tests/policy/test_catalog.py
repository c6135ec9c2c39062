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


def test_each_entry_is_of_its_class():
    for kind, classes in {"rule": RULES, "stop": STOPS, "filter": FILTERS}.items():
        for name, cls in classes.items():
            entry = ENTRIES[kind, name]
            assert entry.neutral and entry.source and entry.class_name == cls.__name__, name
            assert list(entry.parameters) == [f.name for f in dataclasses.fields(cls)], name
            assert kind != "stop" or entry.guarantee == "lossless", name


def test_the_guarantee_is_that_of_the_rule():
    for name, case in CASES.items():
        if name in RULES and (guarantee := find_entry("rule", name).guarantee) != "depends":
            assert {rule.lossless for rule in case.ladder} <= {guarantee == "lossless"}, name


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


def test_each_field_is_checked_by_its_annotation():
    """Whatever it is a number, a choice or an object of: what is none of them is refused by the field's name."""
    for kind in ("rule", "stop", "filter"):
        for make in (entry.make for entry in list_entries(kind)):
            for name in getattr(make, "checks", ()):
                with pytest.raises((TypeError, ValueError), match=rf"{make.__name__}.{name}\b") as error:
                    make.checks[name](f"{make.__name__}.{name}", object())
                assert "\n" not in str(error.value)
