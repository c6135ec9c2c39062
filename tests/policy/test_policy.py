"""Proves that `lossy_policy=` takes every form it promises, and what it refuses."""

import dataclasses
import re
from pathlib import Path
from typing import ClassVar

import pytest
from support import tiny
from support.refusals import refused
from support.rule_cases import Unregistered

import hf_lossy_assist as hla
from hf_lossy_assist import SVIP, Constant, Heuristic, LossyPolicy, Strict, VerifyAll, as_policy
from hf_lossy_assist.policy.parse import split_policies
from hf_lossy_assist.registry import list_entries


# -- JSON -----------------------------------------------------------------------------------------------------------------
def test_the_form_itself():
    """Files that users keep: changing this form breaks them."""
    for stop, form in (
        (SVIP(h=0.4), {"name": "svip", "h": 0.4, "c": 0.15, "form": "bound", "max_draft": 40}),
        (Constant(7), {"name": "constant", "gamma": 7}),
        (Heuristic(), {"name": "heuristic", "initial": 5, "max_draft": 40}),
        (hla.Confidence(), {"name": "confidence", "threshold": 0.4, "max_draft": 20}),
    ):
        assert LossyPolicy(stop=stop).to_dict() == {"stop": form}


def test_neutral_policy():
    policy = LossyPolicy()
    assert (
        policy == LossyPolicy(Strict(), None, VerifyAll()) == as_policy("strict") == as_policy({}) == as_policy("{}")
    )
    assert policy.to_dict() == {} and policy.lossless and str(policy) == "strict"
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

    class Lossy(hla.VerifyFilter):
        lossless: ClassVar[bool] = False

    assert LossyPolicy(stop=SVIP()).lossless and as_policy(Heuristic()).lossless
    assert not LossyPolicy(rule=Unregistered()).lossless
    assert not LossyPolicy(filter=Lossy()).lossless
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


def test_refused_in_one_line(tmp_path):
    for value, error, words in REFUSED:
        with pytest.raises(error) as caught:
            as_policy(value)
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in words), value
        assert value != "zebra" or "Did you mean" not in message, "no far-fetched match"
    LossyPolicy().save_pretrained(tmp_path)
    for path in ("./nosuch", "../nosuch", "/nosuch", "~/nosuch", "nosuch/", tmp_path / "policy.json"):
        refused(lambda path=path: as_policy(path), "^lossy_policy: there is no folder '[^']*' here; ")
    for parts in ({"rule": SVIP()}, {"stop": Strict()}, {"filter": None}, {"rule": "strict"}):
        refused(lambda parts=parts: LossyPolicy(**parts), f"LossyPolicy.{next(iter(parts))}", TypeError)


# -- rules of a user's own ------------------------------------------------------------------------------------------------
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
    refused(lambda: LossyPolicy(rule=Unregistered()).to_dict(), "Unregistered has no name")


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


# -- the short form -----------------------------------------------------------------------------------------------------
FORMS = {
    "svip:h=0.5": hla.LossyPolicy(stop=hla.SVIP(h=0.5)),
    "top_k:k=4+svip": hla.LossyPolicy(hla.TopK(4), hla.SVIP()),
    "svip:max_draft=8+top_k:k=4": hla.LossyPolicy(hla.TopK(4), hla.SVIP(max_draft=8)),
    "strict+svip": hla.LossyPolicy(stop=hla.SVIP()),
    "typical:epsilon=1e-1,delta=2e+0+confidence": hla.LossyPolicy(hla.Typical(0.1, 2.0), hla.Confidence()),
    "top_k:k=4+fallback": hla.LossyPolicy(hla.TopK(4)).with_fallback(),
    "svip+fallback:margin=0.1": hla.LossyPolicy(stop=hla.SVIP()).with_fallback(margin=0.1),
    "lenience:lenience=0.3+all": hla.LossyPolicy(hla.Lenience(0.3)),
}


def test_it_is_the_policy_of_its_parts():
    """In any order."""
    for text, policy in FORMS.items():
        assert hla.as_policy(text) == policy, text
        assert hla.as_policy("+".join(reversed(re.split(r"\+(?=[a-z])", text)))) == policy, text
    head = hla.demo.FOLDER / "sprinter_head"
    policy = hla.as_policy(f"sprinter:head={head},threshold=0.7")
    assert policy == hla.as_policy(hla.Sprinter(hla.Head.from_pretrained(head), threshold=0.7))
    replaced = hla.as_policy(f"sprinter:head={head}+constant:gamma=3")
    assert replaced.rule == policy.rule and replaced.stop == hla.Constant(3)


def test_every_name_whose_parameters_are_numbers_has_one():
    tried = 0
    for kind in ("rule", "stop"):
        for found in list_entries(kind):
            values = {name: found.example.get(name) for name in found.required}
            if values and all(isinstance(value, int | float) for value in values.values()):
                text = f"{found.name}:" + ",".join(f"{name}={value}" for name, value in values.items())
                assert hla.as_policy(text) == hla.LossyPolicy(**{kind: found.make(**values)})
                tried += 1
    assert tried == 2


def test_a_wrong_short_form_is_refused_in_one_line():
    for text, message in (
        ("top_k:k=3+typical", "names two rules; any_of and all_of join stops, union joins rules"),
        ("svip+constant", "names two stops"), ("svip,strict", "unknown policy 'svip,strict'. Did you mean"),
        ("svip+strictt", "unknown policy 'strictt'. Did you mean 'strict'"),
        ("zzz(h=0.1)", "parameters and parts are written as in top_k:k=4+svip"),
        ("svip:hh=1", "the stop svip takes h, c, form, max_draft: got an unexpected keyword argument 'hh'"),
        ("svip+", "joined by + as in top_k:k=4+svip, got 'svip+' in 'svip+'"),
        ("+svip", "unknown policy '+svip'. Did you mean 'svip'"),
        ("svip+fallback:x=2", "the stop fallback takes stop, "), ("svip+fallback+fallback", "names two fallbacks"),
        ("top_k+svip", "the rule top_k takes k: missing a required argument: 'k'"),
        ("top_k:k=", "expected name:parameter=value,…, each once, joined by + as in top_k:k=4+svip, got 'top_k:k='"),
        ("top_k:", "expected name:parameter=value"),
        ("top_k:k=3,k=4", "each once, joined by + as in top_k:k=4+svip, got 'top_k:k=3,k=4'"),
        ("top_k:k=four", "got 'four'"),
        ("sprinter:threshold=0.7", "the method sprinter takes head, threshold, max_draft, patience: missing a required argument: 'head'"),
        ("svip+sprinter:head=x", "the method sprinter stands first"),
        ("sprinter:tau=0.7,head=x", "unexpected keyword argument 'tau'"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=r"^[^\n]*$") as error:
            hla.as_policy(text)
        assert message in str(error.value), text
    listed = 'svip,top_k:k=4+svip:h=0.3,max_draft=8, strict,{"rule": {"name": "top_k", "k": 3}}'
    assert split_policies(listed) == [
        "svip", "top_k:k=4+svip:h=0.3,max_draft=8", "strict", '{"rule": {"name": "top_k", "k": 3}}',
    ]  # fmt: skip
    refused(lambda: split_policies("svip,,strict"), "^expected names of policies with commas between them")
