"""Proves that an entry says what is so: its neutral setting is strict acceptance bit by bit, and a name of one's own works everywhere."""

import dataclasses
import json

import pytest
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import registry
from hf_lossy_assist.registry import register_rule, register_stop
from hf_lossy_assist.rules import RULES


@dataclasses.dataclass(frozen=True)
class Half(hla.Pointwise):
    """Accept what is at least `share` times as likely as the likeliest token."""

    share: float

    def keeps(self, laws):
        return laws.px >= self.share * laws.top


@pytest.fixture
def half():
    register_rule(
        "half", Half, guarantee="lossy", neutral={"share": 1.1}, example={"share": 0.5}, summary="For a test."
    )
    yield
    registry.forget("rule", "half")


def test_a_rule_of_ones_own_has_a_name(half):
    policy = hla.LossyPolicy(Half(0.5))
    assert policy.to_dict() == {"rule": {"name": "half", "share": 0.5}} and hla.as_policy(policy.to_dict()) == policy
    assert RULES["half"] is Half and registry.entry("rule", "half").source == "this package"
    refused(lambda: hla.as_policy("half"), 'needs share.*"share": 0.5')
    refused(lambda: hla.as_policy("hafl"), "Did you mean 'half'")


def test_a_taken_name_is_refused(half):
    refused(
        lambda: register_rule("half", Half, guarantee="lossy", neutral={"share": 1.1}, summary="Again."),
        "register_rule: 'half' is the name of .*Half already: .*forget\\('rule', 'half'\\)",
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"name": "Half"}, "expected a name of a-z"),
        ({"guarantee": "losless"}, "Did you mean 'lossless'"),
        ({"guarantee": "depends"}, "condition="),
        ({"condition": "of the weather"}, "condition="),
        ({"neutral": None}, "a lossy rule needs a neutral setting"),
        ({"neutral": {"shares": 1.0}}, "Did you mean 'share'"),
        ({"summary": "No full stop"}, "ends with a full stop"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(given, line):
    fine = {"name": "half", "cls": Half, "guarantee": "lossy", "neutral": {"share": 1.1}, "summary": "For a test."}
    refused(lambda: register_rule(**(fine | given)), line)
    refused(lambda: register_rule(**(fine | {"cls": 3})), "expected a class or a function", TypeError)
    assert "half" not in RULES


def test_the_stops_of_others_are_lossless_too():
    @dataclasses.dataclass(frozen=True)
    class Two(hla.Constant):
        gamma: int = 2

    register_stop("two", Two, summary="For a test.")
    try:
        assert registry.entry("stop", "two").guarantee == "lossless"
        assert json.loads(str(hla.as_policy("two"))) == {"stop": {"name": "two", "gamma": 2}}
    finally:
        registry.forget("stop", "two")
