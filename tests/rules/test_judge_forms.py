"""Proves that AutoJudge's rule comes back from its JSON form and its folder, and refuses what it cannot be, in one line each."""

import copy
import json
import pickle
import shutil

import torch
from support.heads import make_head
from support.refusals import names, refused

import hf_lossy_assist as hla
from hf_lossy_assist.cli._models import read_policy


def test_the_parts():
    head = make_head()
    policy = hla.AutoJudge(head, 0.3)
    assert policy == hla.LossyPolicy(hla.Judge(head, 0.3), hla.Constant(32)) and not policy.lossless
    assert hash(policy) == hash(hla.LossyPolicy(hla.Judge(head, 0.3), hla.Constant(32)))
    assert (
        hla.AutoJudge(head, 0.3, 7).stop == hla.Constant(7)
        and hla.AutoJudge(head, 0.3, stop=hla.SVIP()).stop == hla.SVIP()
    )
    assert hla.AutoJudge(make_head(), 0.3) == policy and hla.AutoJudge(head, 1) == hla.AutoJudge(head, 1.0)
    others = (
        hla.AutoJudge(head, 0.4), hla.AutoJudge(make_head(bias=1.0), 0.3), hla.AutoJudge(head, 0.3, 8),
        hla.LossyPolicy(),
    )  # fmt: skip
    assert all(policy != other for other in others)
    assert policy.heads() == {"rule_head": head} and policy.rule.features == head.config.features
    assert not hla.AutoJudge(head, 0).lossless, "the class says it, not the value"
    thresholded = make_head(threshold=0.25)
    assert hla.AutoJudge(thresholded) == hla.AutoJudge(thresholded, 0.25) == hla.as_policy(thresholded)
    assert hla.AutoJudge(thresholded).rule.threshold == 0.25 and hla.Judge(thresholded, 0).threshold == 0
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and again.rule.head is not head
    assert copy.deepcopy(policy) is policy and copy.deepcopy(policy.rule) is policy.rule  # frozen, so a copy can share
    plain = hla.LinearHead(hla.HeadConfig(32))
    assert hla.as_policy(plain) == hla.Sprinter(plain)
    assert hla.as_policy(hla.Judge(head, 0.3)) == hla.LossyPolicy(hla.Judge(head, 0.3)) and hla.as_policy(
        hla.TopK(3)
    ) == hla.LossyPolicy(hla.TopK(3))


def test_judges_that_read_other_states_differ():
    predicting = make_head(features=hla.FeatureSpec("target", "predicting"))
    assert hla.Judge(make_head(), 0.3) != hla.Judge(predicting, 0.3)


def test_json(tmp_path):
    fresh = hla.AutoJudge(make_head(), 0.3)
    refused(fresh.to_dict, "never saved has no JSON form: head.save_pretrained")
    assert "LinearHead" in str(fresh) and "0.3" in str(fresh)
    make_head(threshold=0.25).save_pretrained(tmp_path / "head")
    loaded = hla.Head.from_pretrained(tmp_path / "head")
    policy, place = hla.AutoJudge(loaded, 0.3, 7), str(tmp_path / "head")
    assert policy.to_dict() == {
        "rule": {"name": "judge", "head": place, "threshold": 0.3}, "stop": {"name": "constant", "gamma": 7},
    }  # fmt: skip
    for form in (policy.to_dict(), json.dumps(policy.to_dict()), str(policy)):
        assert hla.as_policy(form) == policy
    spec = {"rule": {"name": "judge", "head": place}}
    assert hla.LossyPolicy.from_dict(spec).rule == hla.Judge(loaded, 0.25), "no threshold: the head's own"
    assert hla.as_policy({"rule": {"name": "judge", "head": loaded, "threshold": 1}}).rule == hla.Judge(loaded, 1)
    refused(lambda: hla.as_policy({"rule": {"name": "judge", "head": 5}}), "expected Head, got 5", TypeError)
    refused(lambda: hla.as_policy({"rule": {"name": "judge", "head": str(tmp_path / "no")}}), "neither a folder here")
    refused(lambda: hla.as_policy({"rule": {"name": "judge", "head": place, "threshold": 2}}), "Judge.threshold.*2")


def test_a_policys_folder(tmp_path):
    """Both heads have folders of their own inside it, so that it can be moved."""
    head, doubt = make_head(weight=torch.randn(32), threshold=0.25), hla.LinearHead(hla.HeadConfig(32)).eval()
    policy = hla.AutoJudge(head, 0.4, stop=hla.HeadStop(doubt, 0.6, 9))
    assert policy.heads() == {"rule_head": head, "stop_head": doubt}
    policy.save_pretrained(tmp_path / "made")
    assert names(tmp_path / "made") == {"policy.json", "README.md", "rule_head", "stop_head"}
    assert policy.rule.head.source == str(tmp_path / "made" / "rule_head")
    shutil.move(tmp_path / "made", folder := tmp_path / "moved")
    spec = json.loads((folder / "policy.json").read_text())
    assert (
        spec["rule"] == {"name": "judge", "head": "rule_head", "threshold": 0.4}
        and spec["stop"]["head"] == "stop_head"
    )
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "**Lossy**" in card and '"judge"' in card
    for form in (folder, str(folder)):
        loaded = hla.as_policy(form)
        assert loaded == policy == hla.LossyPolicy.from_pretrained(folder) and not loaded.lossless
        for name, saved in policy.heads().items():
            assert loaded.heads()[name].config == saved.config
            assert all(
                torch.equal(loaded.heads()[name].tensors()[key], saved.tensors()[key]) for key in saved.tensors()
            )
        assert hla.as_policy(loaded.to_dict()) == policy


def test_a_folder_with_a_head_alone(tmp_path):
    """Its config names the method that it is for."""
    make_head(threshold=0.25).save_pretrained(tmp_path / "important")
    hla.LinearHead(hla.HeadConfig(32)).save_pretrained(tmp_path / "acceptable")
    make_head().save_pretrained(tmp_path / "without")
    for form in (tmp_path / "important", str(tmp_path / "important")):
        for policy in (hla.as_policy(form), hla.LossyPolicy.from_pretrained(form)):
            assert policy.rule.threshold == 0.25 and policy.stop == hla.Constant(32)
    assert hla.as_policy(tmp_path / "acceptable") == hla.Sprinter(hla.Head.from_pretrained(tmp_path / "acceptable"))
    refused(lambda: hla.as_policy(tmp_path / "without"), "names no threshold")


def test_wrong_heads_and_values_are_refused():
    head = make_head()
    for make in (hla.Judge, hla.AutoJudge):
        refused(
            lambda make=make: make(hla.LinearHead(hla.HeadConfig(32)), 0.5),
            r"P\(acceptable\).*Sprinter.*fit autojudge",
        )
        refused(lambda make=make: make("org/head", 0.5), "Judge.head: expected Head, got 'org/head'", TypeError)
        refused(lambda make=make: make(head), "names no threshold")
        companion = make_head(features=hla.FeatureSpec("companion"))
        refused(lambda make=make, h=companion: make(h, 0.5), "companion")
    refused(lambda: hla.AutoJudge(head, 0.5, 0), "Constant.gamma: .*whole number of at least 1.*0")
    refused(lambda: hla.AutoJudge(head, 0.5, 8, hla.SVIP()), "window and stop")
    refused(lambda: hla.AutoJudge(head, 0.5, stop="svip"), "LossyPolicy.stop.*DraftStop.*'svip'", TypeError)
    refused(lambda: hla.Sprinter(head), r"P\(acceptable\).*P\(important\)")
    refused(lambda: hla.HeadStop(head), r"P\(important\)")
    refused(lambda: hla.as_policy(hla.AutoJudge), "got <function autojudge", TypeError)
    refused(lambda: hla.demo.head("autojuge"), "unknown method 'autojuge'. Did you mean 'autojudge'")
    refused(lambda: hla.demo.head(None), "demo.head: unknown method")
    assert hla.demo.head().config.polarity == hla.demo.head("sprinter").config.polarity == "acceptable"


def test_the_command_lines_policy(tmp_path):
    """`--policy autojudge:…`; with the demo's models a head's default is the demo's."""
    make_head(threshold=0.25).save_pretrained(tmp_path / "judge")
    head = hla.Head.from_pretrained(tmp_path / "judge")
    for parameters, expected in (
        ("", hla.AutoJudge(head, 0.25, 32)), (",threshold=0.5", hla.AutoJudge(head, 0.5)), (",window=9", hla.AutoJudge(head, window=9)),
        (",threshold=0,window=5", hla.AutoJudge(head, 0, 5)),
    ):  # fmt: skip
        for demo_models in (True, False):
            assert read_policy(f"autojudge:head={tmp_path / 'judge'}{parameters}", demo_models) == expected
    assert read_policy("autojudge:threshold=0.4", True) == hla.AutoJudge(hla.demo.head("autojudge"), 0.4)
    assert read_policy("sprinter+fallback", True) == hla.Sprinter(hla.demo.head()).with_fallback()
