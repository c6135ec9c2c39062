"""Proves that `lossy_policy=` takes every form it promises, and what it refuses."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
from support import tiny
from support.refusals import refused
from support.rule_cases import Unregistered

import hf_lossy_assist as hla
from hf_lossy_assist import (
    SVIP,
    Confidence,
    Constant,
    Heuristic,
    LossyPolicy,
    Strict,
    VerifyAll,
    VerifyFilter,
    as_policy,
)


# -- JSON -----------------------------------------------------------------------------------------------------------------


def test_the_form_itself():
    """Files that users keep: changing this form breaks them."""
    assert LossyPolicy(stop=SVIP(h=0.4)).to_dict() == {
        "stop": {"name": "svip", "h": 0.4, "c": 0.15, "form": "bound", "max_draft": 40}
    }
    assert LossyPolicy(stop=Constant(7)).to_dict() == {"stop": {"name": "constant", "gamma": 7}}
    assert LossyPolicy(stop=Heuristic()).to_dict() == {"stop": {"name": "heuristic", "initial": 5, "max_draft": 40}}
    assert LossyPolicy(stop=Confidence()).to_dict() == {
        "stop": {"name": "confidence", "threshold": 0.4, "max_draft": 20, "reads": "probability"}
    }


def test_neutral_policy():
    policy = LossyPolicy()
    assert (
        policy == LossyPolicy(Strict(), None, VerifyAll()) == as_policy("strict") == as_policy({}) == as_policy("{}")
    )
    assert policy.to_dict() == {} and policy.lossless and str(policy) == "strict"


def test_names_and_defaults_in_the_json_form():
    """A name alone stands for its defaults; every neutral part may be spelled out."""
    assert as_policy({"stop": "svip"}) == as_policy("svip") == LossyPolicy(stop=SVIP())
    assert as_policy({"rule": "strict", "stop": None, "filter": "all"}) == LossyPolicy()
    assert as_policy({"stop": {"name": "heuristic", "initial": 2}}) == LossyPolicy(stop=Heuristic(2))
    assert as_policy({"stop": SVIP(h=1.0)}) == LossyPolicy(stop=SVIP(h=1.0))


# -- what it accepts ------------------------------------------------------------------------------------------------------


def test_every_accepted_kind():
    policy, stop, rule, verify = LossyPolicy(stop=SVIP()), SVIP(h=1.0), Unregistered(), VerifyAll()
    assert as_policy(policy) is policy
    assert as_policy(stop) == LossyPolicy(stop=stop)
    assert as_policy(rule) == LossyPolicy(rule=rule)
    assert as_policy(verify) == LossyPolicy(filter=verify)
    assert as_policy({"stop": {"name": "svip", "h": 1.0}}) == LossyPolicy(stop=stop)
    assert as_policy('  {"stop": "svip"}') == policy


def test_lossless_is_what_the_parts_are():
    class Lossy(VerifyFilter):
        lossless: ClassVar[bool] = False

    assert LossyPolicy(stop=SVIP()).lossless and as_policy(Heuristic()).lossless
    assert not LossyPolicy(rule=Unregistered()).lossless
    assert not LossyPolicy(filter=Lossy()).lossless


def test_a_policy_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossyPolicy().stop = SVIP()
    assert len({LossyPolicy(), LossyPolicy(), as_policy("svip"), as_policy("svip")}) == 2


# -- what it refuses ------------------------------------------------------------------------------------------------------


REFUSED = (
    ("svp", ValueError, ["'svp'", "Did you mean 'svip'?"]),
    ("zebra", ValueError, ["'zebra'", "hf-lossy policies lists the names"]),
    ({"stpo": "svip"}, ValueError, ["entry 'stpo'", "Did you mean 'stop'?"]),
    ({"stop": "heuristik"}, ValueError, ["stop 'heuristik'", "Did you mean 'heuristic'?"]),
    ({"rule": "strikt"}, ValueError, ["rule 'strikt'", "Did you mean 'strict'?"]),
    ({"filter": "al"}, ValueError, ["filter 'al'", "Did you mean 'all'?"]),
    ({"stop": {"name": "svip", "max_drafts": 4}}, ValueError, ["takes h, c, form, max_draft", "'max_drafts'"]),
    ({"stop": {"name": "constant", "lengths": 4}}, ValueError, ["the stop constant takes gamma", "'lengths'"]),
    ({"stop": {"name": "svip", "h": -1}}, ValueError, ["SVIP.h"]),
    ({"stop": {"name": "svip", "h": "0.3"}}, TypeError, ["SVIP.h"]),
    ({"stop": {"h": 0.3}}, ValueError, ["stop", "name"]),
    ({"stop": 5}, ValueError, ["stop", "5"]),
    ({"stop": ["svip"]}, ValueError, ["stop", "svip"]),
    ('{"stop": ', ValueError, ["not JSON"]),
    ('{"stop": "svp"}', ValueError, ["Did you mean 'svip'?"]),
    ("nowhere/policy.json", ValueError, ["no folder", "nowhere/policy.json"]),
    ("org/nosuch", ValueError, ["no folder 'org/nosuch' here", "from_pretrained("]),
    (5, TypeError, ["got 5"]),
    (["svip"], TypeError, ["['svip']"]),
    (SVIP, TypeError, ["lossy_policy"]),  # the class, not a stop
)


def test_refused_in_one_line():
    for value, error, words in REFUSED:
        with pytest.raises(error) as caught:
            as_policy(value)
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in words), value
        assert value != "zebra" or "Did you mean" not in message, "no far-fetched match"


def test_a_folder_that_is_not_there_is_looked_for_nowhere_else(tmp_path):
    LossyPolicy().save_pretrained(tmp_path)
    for path in ("./nosuch", "../nosuch", "/nosuch", "~/nosuch", "nosuch/", tmp_path / "policy.json"):
        refused(lambda path=path: as_policy(path), "^lossy_policy: there is no folder '[^']*' here; ")


def test_parts_of_the_wrong_kind():
    for parts in ({"rule": SVIP()}, {"stop": Strict()}, {"filter": None}, {"rule": "strict"}):
        refused(lambda parts=parts: LossyPolicy(**parts), f"LossyPolicy.{next(iter(parts))}", TypeError)


# -- rules of a user's own ------------------------------------------------------------------------------------------------


def test_an_unregistered_rule_has_no_json_form():
    with pytest.raises(ValueError, match="Unregistered has no name"):
        LossyPolicy(rule=Unregistered()).to_dict()


def test_an_unregistered_rule_works(monkeypatch):
    """It needs no JSON form to be used or printed; only to be saved."""
    monkeypatch.setattr(
        "hf_lossy_assist.generation.model_checks._warned", set()
    )  # another test may have used it before
    model = tiny.shared("llama")
    assert "Unregistered" in str(LossyPolicy(rule=Unregistered()))
    with pytest.warns(UserWarning, match="lossy"):
        out = hla.enable(model).generate(
            **tiny.prompts((9,)), assistant_model=tiny.draft_of(model, "never"), lossy_policy=Unregistered(),
            do_sample=True, max_new_tokens=12, eos_token_id=tiny.NEVER_EMITTED, return_dict_in_generate=True,
        )  # fmt: skip
    assert out.speculation.draft_acceptance_rate == 1.0 and out.speculation.num_lossy_accepts > 0


def test_a_name_is_no_folder(tmp_path, monkeypatch):
    """Whatever lies in the working directory; a folder that is called like a name is written with ./ before it."""
    monkeypatch.chdir(tmp_path)
    for name in ("strict", "svip", "typical", "sprinter"):
        LossyPolicy(stop=hla.Constant(7)).save_pretrained(name)
    assert as_policy("strict") == LossyPolicy() and as_policy("svip") == hla.svip()
    assert as_policy("typical") == LossyPolicy(hla.Typical())
    refused(lambda: as_policy("sprinter"), "the method sprinter takes head, .*missing a required argument: 'head'")
    for folder in ("./strict", "./typical", Path("svip"), tmp_path / "sprinter"):
        assert as_policy(folder) == LossyPolicy(stop=hla.Constant(7))
