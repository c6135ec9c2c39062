"""Proves that an entry says what is so, and that a name of one's own works everywhere. `rules/test_rule_matrix.py`: neutral settings are strict."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Literal

import pytest
from support.refusals import refused
from support.rule_cases import CASES

import hf_lossy_assist as hla
from hf_lossy_assist import as_policy, registry
from hf_lossy_assist.filters import FILTERS
from hf_lossy_assist.registry import KINDS, REQUIRED, Names, find_entry, list_entries, register_rule, register_stop
from hf_lossy_assist.registry.frozen import Count, Share
from hf_lossy_assist.rules import RULES
from hf_lossy_assist.stops import STOPS


@dataclasses.dataclass(frozen=True)
class Half(hla.Pointwise):
    """Accept what is at least `share` times as likely as the likeliest token."""

    share: float

    def keeps(self, laws):
        return laws.px >= self.share * laws.top


@dataclasses.dataclass(frozen=True)
class Sometimes(Half):
    @property
    def lossless(self):
        return self.share > 1


@pytest.fixture
def half():
    register_rule("half", Half, neutral={"share": 1.1}, example={"share": 0.5})
    yield
    registry.forget("rule", "half")


def test_a_custom_rule_has_a_name_of_its_own(half):
    policy = hla.LossyPolicy(Half(0.5))
    assert policy.to_dict() == {"rule": {"name": "half", "share": 0.5}} and hla.as_policy(policy.to_dict()) == policy
    assert RULES["half"] is Half and registry.find_entry("rule", "half").source == Half.__module__
    assert registry.find_entry("rule", "limited").source == "this package"
    refused(lambda: hla.as_policy("half"), "the rule half takes share: missing a required argument: 'share'")
    refused(lambda: hla.as_policy("hafl"), "Did you mean 'half'")
    refused(
        lambda: register_rule("half", hla.TopK, neutral={"k": 1}),
        "register_rule: 'half' is the name of .*Half already: .*forget\\('rule', 'half'\\)",
    )
    assert register_rule("half", Half, neutral={"share": 1.2}) is Half  # as a notebook's cell does that runs again
    refused(lambda: registry.forget("rules", "half"), "Did you mean 'rule'")
    refused(lambda: registry.forget("rule", "topk"), "Did you mean 'top_k'")


def test_a_class_registers_by_its_keywords():
    """As a frozen dataclass, whose fields are checked by their annotations."""

    class Quarter(Half, name="quarter", neutral={"share": 1.1}, ladder=("share", (0.75, 0.5, 0.25))):
        share: Share
        form: Literal["a", "b"] = "a"
        at_most: Count | None = None
        strictly: bool = False

    try:
        entry = registry.find_entry("rule", "quarter")
        assert entry.make is Quarter and entry.guarantee == "lossy" and entry.example == {"share": 0.5}
        assert hla.as_policy("quarter:share=0.5") == hla.LossyPolicy(Quarter(0.5)) and hash(Quarter(0.5))
        refused(lambda: Quarter(1.5), "Quarter.share: expected a number from 0 to 1, got 1.5")
        refused(lambda: Quarter(0.5, form="c"), "unknown Quarter.form 'c'; there are a, b")
        refused(lambda: Quarter(0.5, at_most=-1), "Quarter.at_most: expected a whole number of at least 0, got -1")
        refused(lambda: Quarter(0.5, strictly=1), "Quarter.strictly: expected True or False, got 1", TypeError)
        with pytest.raises(dataclasses.FrozenInstanceError):
            Quarter(0.5).share = 0.6
    finally:
        registry.forget("rule", "quarter")


class OwnInit(hla.Pointwise):
    def __init__(self, t=0.5):
        object.__setattr__(self, "t", t)


@dataclasses.dataclass(frozen=True)
class OwnInitDecorated(hla.Pointwise):
    t: float = 0.5

    def __init__(self, threshold=0.5):
        object.__setattr__(self, "t", threshold)


@dataclasses.dataclass(frozen=True)
class Counting(hla.Pointwise):
    t: float = 0.5
    seen: int = dataclasses.field(default=0, init=False)


def test_a_class_or_an_entry_that_json_could_not_hold_is_refused():
    """And one of another kind."""
    for cls, line in (
        (OwnInit, "OwnInit is no frozen dataclass.*@dataclass"),
        (OwnInitDecorated, "takes threshold, and its fields are t: "),
        (Counting, "takes t, and its fields are t, seen: "),
        (int, "expected a subclass of AcceptanceRule, got <class 'int'>"),
        (hla.Constant, "expected a subclass of AcceptanceRule, got"),
        (lambda: None, "expected a subclass of AcceptanceRule, got <function"),
    ):
        refused(lambda: register_rule("x", cls, neutral={}), line, TypeError)  # noqa: B023
        assert "x" not in RULES
    for register in (register_stop, registry.register_filter, registry.register_drafter):
        refused(lambda: register("x", Half, neutral={}), "expected a subclass of .*, got .*Half", TypeError)  # noqa: B023

    class Own(hla.Drafter):
        def __init__(self, size):
            self.size = size

    class Plain(hla.Drafter):
        pass

    line = "Own takes size, and its fields are none: its JSON form is made of the fields"
    refused(lambda: registry.register_drafter("x", Own, summary="For a test."), line, TypeError)
    assert registry.register_drafter("x", Plain, summary="For a test.") is Plain
    registry.forget("drafter", "x")
    for given, line in (
        ({"name": "Half"}, "expected a name of a-z"),
        ({"name": "a" * 100_000}, "expected a name of a-z"),
        ({"neutral": None}, "a lossy rule needs a neutral setting"),
        ({"cls": Sometimes}, "its lossless is a property: say by condition="),
    ):
        settings = {"name": "half", "cls": Half, "neutral": {"share": 1.1}} | given
        refused(lambda: register_rule(**settings), line)  # noqa: B023
        assert "half" not in RULES


def test_a_recipe_makes_a_policy():
    entry = {"guarantee": "lossless", "summary": "For a test."}
    refused(lambda: hla.register_method("x", recipe=hla.svip, guarantee="losless"), "Did you mean 'lossless'")
    for made, line, kind in (
        ({"stop": "svip"}, "must return a lossless LossyPolicy, it returned {'stop': 'svip'}", TypeError),
        (hla.LossyPolicy(hla.TopK(3)), "must return a lossless LossyPolicy, it returned LossyPolicy", TypeError),
    ):
        hla.register_method("x", recipe=lambda made=made: made, **entry)
        try:
            refused(lambda: hla.as_policy("x"), line, kind)
        finally:
            registry.forget("method", "x")


def test_the_stops_of_others_are_lossless_too():
    @dataclasses.dataclass(frozen=True)
    class Two(hla.Constant):
        gamma: int = 2

    register_stop("two", Two, summary="For a test.")
    try:
        assert registry.find_entry("stop", "two").guarantee == "lossless"
        assert json.loads(str(hla.as_policy("two"))) == {"stop": {"name": "two", "gamma": 2}}
    finally:
        registry.forget("stop", "two")


# -- what hf-lossy policies lists ---------------------------------------------------------------------------------------
ENTRIES = {(entry.kind, entry.name): SimpleNamespace(**entry.describe()) for entry in list_entries()}


def test_every_entry_is_of_its_class_and_says_what_is_so():
    expected = {(kind, name) for kind in KINDS for name in Names(kind)}
    assert {kind for kind, _ in expected} == set(KINDS) and set(ENTRIES) == expected
    for kind, classes in {"rule": RULES, "stop": STOPS, "filter": FILTERS}.items():
        for name, cls in classes.items():
            entry = ENTRIES[kind, name]
            assert entry.neutral and entry.source and entry.class_name == cls.__name__, name
            assert list(entry.parameters) == [f.name for f in dataclasses.fields(cls)], name
            assert kind != "stop" or entry.guarantee == "lossless", name
    neutral = {"sprinter": 1.0, "autojudge": 0.0}
    assert {name: find_entry("method", name).neutral["threshold"] for name in neutral} == neutral
    assert find_entry("rule", "judge").neutral == {"threshold": 0.0}
    for name, case in CASES.items():
        if name in RULES and (guarantee := find_entry("rule", name).guarantee) != "depends":
            assert {rule.lossless for rule in case.ladder} <= {guarantee == "lossless"}, name
    for (kind, name), line in ENTRIES.items():
        if kind in ("rule", "stop") and REQUIRED not in line.parameters.values():
            policy = as_policy({kind: name})
            assert type(getattr(policy, kind)).__name__ == line.class_name
    for kind in ("rule", "stop", "filter"):
        for make in (entry.make for entry in list_entries(kind)):
            for name in getattr(make, "checks", ()):
                with pytest.raises((TypeError, ValueError), match=rf"{make.__name__}.{name}\b") as error:
                    make.checks[name](f"{make.__name__}.{name}", object())
                assert "\n" not in str(error.value)


def test_the_command(hf_lossy):
    done = hf_lossy("policies", "--json")
    listed = json.loads(done.out)
    assert [(e["kind"], e["name"]) for e in listed] == list(ENTRIES)
    facts = {"name", "kind", "class_name", "guarantee", "neutral", "parameters", "source", "summary"}
    assert all(set(e) == facts for e in listed)
    shown = hf_lossy("policies")
    for name in RULES:
        assert name[:8] in shown.out
    only = json.loads(hf_lossy("policies", "--json", "--kind", "filter").out)
    assert {e["name"] for e in only} == set(FILTERS)
    assert "Did you mean 'rule'" in hf_lossy("policies", "--kind", "rules").line
