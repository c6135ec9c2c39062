"""Proves that SPRINTER's policy is its parts, comes back from JSON and from its folder, and is saved whole or not at all."""

import json
import math
import shutil
from typing import Any

import pytest
import torch
from support import tiny
from support.heads import draft_of, head_for, sure
from support.refusals import contents, names, refused
from support.tiny import assisted, prompts

import hf_lossy_assist as hla
from hf_lossy_assist import AllButLast, HeadConfig, HeadStop, LinearHead, LossyPolicy, as_policy


def Sprinter(head, threshold=0.5, max_draft=20, patience=1.0):  # patience 1: each row as it would be alone
    return hla.Sprinter(head, threshold, max_draft, patience)


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

RAGGED = (9, 1, 4, 14)


def test_the_parts():
    head = sure(0.5)
    policy = hla.Sprinter(head)
    assert policy == LossyPolicy(AllButLast(), HeadStop(head, 0.5, 20, 0.0)) == as_policy(head) and not policy.lossless
    assert hash(policy) == hash(as_policy(head)) and hla.Sprinter(sure(0.5)) == policy != Sprinter(sure(0.4))
    assert policy.heads() == {"stop_head": head} and policy != Sprinter(head, 0.6)
    for settings, error in (
        ({"threshold": -0.1}, ValueError), ({"threshold": math.nan}, ValueError), ({"threshold": "0.5"}, TypeError),
        ({"max_draft": 0}, ValueError), ({"max_draft": 2.0}, TypeError), ({"patience": 1.5}, ValueError),
    ):  # fmt: skip
        refused(lambda settings=settings: Sprinter(head, **settings), f"HeadStop.{next(iter(settings))}", error)
    refused(lambda: Sprinter("org/head"), "expected Head, got", TypeError)
    specs = {"features": hla.FeatureSpec("target")}, {"features": hla.FeatureSpec(position="token")}
    for config in ({"polarity": "important"}, *specs):
        head = LinearHead(HeadConfig(32, **config))
        refused(lambda head=head: Sprinter(head), r"P\(acceptable\).*this head computes")
    refused(lambda: as_policy("sprinter"), "the method sprinter takes head, ")
    assert as_policy({"rule": "all_but_last"}) == LossyPolicy(AllButLast())


def test_json(tmp_path):
    head = head_for(draft_of("llama"))
    fresh = Sprinter(sure(0.5))
    refused(fresh.to_dict, "never saved has no JSON form: head.save_pretrained")
    assert "LinearHead" in str(fresh)
    loaded = hla.Head.from_pretrained(saved := _saved(head, tmp_path / "head"))
    policy = Sprinter(loaded, 0.3, 7, 0.5)
    assert policy.to_dict() == {
        "rule": {"name": "all_but_last"},
        "stop": {"name": "head", "head": saved, "threshold": 0.3, "max_draft": 7, "patience": 0.5},
    }
    for form in (policy.to_dict(), json.dumps(policy.to_dict()), str(policy)):
        assert as_policy(form) == policy
    assert as_policy({"stop": {"name": "head", "head": head}}) == LossyPolicy(stop=HeadStop(head))
    refused(lambda: as_policy({"stop": "head"}), "the stop head takes head, ")
    refused(lambda: as_policy({"stop": {"name": "head", "head": str(tmp_path / "none")}}), "neither a folder here")


def _saved(head: hla.Head, folder: Any) -> str:
    source = head.source
    head.save_pretrained(folder)
    head.source = source  # `head_for` keeps it for other tests
    return str(folder)


def test_a_policys_folder(tmp_path):
    """It names its head by a folder of its own, so that it can be moved, and loads the same weights."""
    head, target, draft = head_for.__wrapped__(draft_of("llama"), "mlp"), tiny.shared("llama"), draft_of("llama")
    policy = Sprinter(head, 0.45, 9)
    policy.save_pretrained(tmp_path / "made")
    assert policy.to_dict()["stop"]["head"] == str(tmp_path / "made" / "stop_head") and names(tmp_path) == {"made"}
    head.source = None  # `head_for` keeps it for other tests
    shutil.move(tmp_path / "made", tmp_path / "moved")
    folder = tmp_path / "moved"
    assert names(folder) == {"policy.json", "README.md", "stop_head"}
    assert json.loads((folder / "policy.json").read_text())["stop"]["head"] == "stop_head"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(words in card for words in ("**Lossy**", '"all_but_last"', "library_name: hf_lossy_assist"))
    expected = assisted(target, prompts(RAGGED), draft, policy).sequences
    for form in (folder, str(folder)):
        loaded = as_policy(form)
        assert loaded == policy == LossyPolicy.from_pretrained(folder) and loaded.stop.head.digest == head.digest
        for name, tensor in head.tensors().items():
            assert torch.equal(loaded.heads()["stop_head"].tensors()[name], tensor)
        assert torch.equal(assisted(target, prompts(RAGGED), draft, form).sequences, expected)
        assert as_policy(loaded.to_dict()) == policy
    assert (
        LossyPolicy.from_pretrained(folder / "stop_head") == as_policy(str(folder / "stop_head")) == hla.Sprinter(head)
    )
    LossyPolicy().save_pretrained(tmp_path / "strict")
    assert "**Lossless**" in (tmp_path / "strict" / "README.md").read_text(encoding="utf-8")


def test_an_error_while_saving_a_policy_leaves_what_was(tmp_path, monkeypatch):
    goal, policy = tmp_path / "policy", Sprinter(sure(0.5))
    Sprinter(sure(0.7), 0.2).save_pretrained(goal)
    before = contents(tmp_path)

    def fail(*_, **__):
        raise KeyboardInterrupt

    for name in ("render", "Head.write"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"hf_lossy_assist.policy.policy.{name}", fail)
            policy.save_pretrained(goal)
        assert contents(tmp_path) == before and policy.stop.head.source is None
    (goal / "README.md").unlink()
    policy.save_pretrained(goal)
    assert LossyPolicy.from_pretrained(goal) == policy and policy.stop.head.source == str(goal / "stop_head")
