"""Proves that a method's name and what it needs are its policy, in Python as on the command line, and what is refused beside a name."""

import json
import threading

import pytest
from support import tiny
from support.heads import make_head
from support.profiles import profile
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import as_policy, demo, registry


def linear(**config):
    return hla.LinearHead(hla.HeadConfig(32, **config)).eval()


def test_a_name_with_what_it_needs(tmp_path):
    judge, doubt = make_head(threshold=0.25), linear()
    token = linear(method="specdec", features=hla.FeatureSpec(position="token"))
    assert as_policy("autojudge", head=judge) == hla.AutoJudge(judge) == hla.autojudge(judge, 0.25)
    assert as_policy("sprinter", head=doubt) == hla.Sprinter(doubt, 0.5)
    assert as_policy("specdec", head=token) == hla.LossyPolicy(stop=hla.SpecDecPP(token, 0.7)) == as_policy(token)
    judge.save_pretrained(tmp_path / "judge")
    for source in (tmp_path / "judge", str(tmp_path / "judge")):
        assert as_policy("autojudge", head=source) == hla.AutoJudge(judge)
    made, draft = profile(), tiny.shared("llama")
    made.save_pretrained(tmp_path / "profile")
    expected = hla.SpeculativeVerification(made, draft)
    for source in (made, tmp_path / "profile"):
        assert as_policy("sv", profile=source, companion=draft) == expected
    short = as_policy(f"sv:profile={tmp_path / 'profile'},companion=demo")
    assert short.stop == expected.stop  # as many tokens as were profiled, not Transformers' default
    assert as_policy(f"sv:profile={tmp_path / 'profile'},companion=demo+svip").stop == hla.SVIP()
    with pytest.raises(ValueError, match="names two filters"):
        as_policy(f"sv:profile={tmp_path / 'profile'},companion=demo+sv:profile=x,companion=demo")
    assert as_policy("sv", profile=made, companion="org/name").filter.companion == "org/name"
    assert hla.sprinter(linear(threshold=0.8)).stop.threshold == 0.8
    assert hla.sprinter(linear(threshold=0.8), 0.0).stop.threshold == 0.0


@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
def test_generate_takes_it():
    models = demo.load()
    inputs = models.tokenizer(demo.problems(1, 0)[0].prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    settings = {"assistant_model": models.draft, "max_new_tokens": 12, "do_sample": False}
    target = hla.enable(models.target)
    head = demo.head("autojudge")
    by_name = target.generate(**inputs, **settings, lossy_policy="autojudge", head=head)
    assert by_name.equal(target.generate(**inputs, **settings, lossy_policy=hla.AutoJudge(head)))
    refused(lambda: target.generate(**inputs, **settings, head=head), "head=… is for a method.*lossy_policy")
    refused(
        lambda: target.generate(**inputs, **settings, lossy_policy=hla.Strict(), head=head), "head=… is for lossy_pol"
    )
    refused(lambda: target.generate(**inputs, **settings, lossy_policy="strict", heads=head), "heads", TypeError)


def test_what_stands_beside_another_name_is_refused():
    for given, beside, line in (
        ("autojudge", {}, "the method autojudge takes head, threshold, window, stop: missing a required argument: 'head'"),
        ("sv", {"companion": "org/name"}, "the method sv takes profile, .*: missing a required argument: 'profile'"),
        ("svip", {"head": "org/name"}, "the method svip takes h, .*unexpected keyword argument 'head'"),
        ("sprinter", {"head": "org/name", "profile": "org/name"}, "the method sprinter takes head, .*unexpected keyword argument 'profile'"),
        ("typical", {"head": "org/name"}, 'head=… is for lossy_policy="sprinter" or .*not for lossy_policy=.typical'),
        ({"stop": "svip"}, {"companion": "org/name"}, 'companion=… is for lossy_policy="sv"'),
    ):  # fmt: skip
        refused(lambda: as_policy(given, **beside), line)  # noqa: B023
    refused(
        lambda: as_policy(linear(polarity="important")),
        r"P\(important\).*method 'sprinter', whose heads say P\(acceptable\).*HeadConfig\(method=…\)",
    )
    refused(lambda: as_policy(linear(method="sprintr")), "unknown method 'sprintr'.*Did you mean 'sprinter'")
    refused(lambda: as_policy(linear(method="svip")), r"svip.*whose heads say P\(None\)")


def test_a_custom_method():
    def careful(head: hla.Head, threshold: float = 0.9) -> hla.LossyPolicy:
        return hla.sprinter(head, threshold, max_draft=3)

    hla.register_method(
        "careful", recipe=careful, title="Careful", guarantee="lossy", neutral={"threshold": 1.0},
        head_kind=registry.HeadKind("acceptable"), summary="For a test.",
    )  # fmt: skip
    try:
        head = linear(method="careful")
        assert as_policy("careful", head=head) == as_policy(head) == careful(head)
        assert 'lossy_policy="careful", head=head' in str(head.card())
        refused(lambda: as_policy("carefull"), "Did you mean 'careful'")
    finally:
        hla.forget("method", "careful")


def test_serialising_leaves_shared_heads_alone(tmp_path):
    """A head that two policies share keeps its name while another thread saves one of them."""
    head = linear()
    head.save_pretrained(tmp_path / "head")
    policy, wrong, done = hla.sprinter(head), [], threading.Event()

    def watch():
        while not done.is_set():
            if policy.to_dict()["stop"]["head"] != str(tmp_path / "head"):
                wrong.append(policy.to_dict())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for k in range(3):
            policy.save_pretrained(tmp_path / f"policy {k}")
    finally:
        done.set()
        watching.join()
    assert not wrong and head.source == str(tmp_path / "head")
    assert json.loads((tmp_path / "policy 0" / "policy.json").read_text())["stop"]["head"] == "stop_head"
