"""`top_k:k=4+svip`: a policy as one types it."""

import re

import pytest

import hf_lossy_assist as hla
from hf_lossy_assist.policy.parse import split_policies
from hf_lossy_assist.registry import list_entries


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


def test_a_method_with_its_head():
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


WRONG = (
    ("top_k:k=3+typical", "names two rules; any_of and all_of join stops, union joins rules"),
    ("svip+constant", "names two stops"), ("svip,strict", "unknown policy 'svip,strict'. Did you mean"),
    ("svip+strictt", "unknown policy 'strictt'. Did you mean 'strict'"),
    ("zzz(h=0.1)", "parameters and parts are written as in top_k:k=4+svip"),
    ("svip:hh=1", "the stop svip takes h, c, form, max_draft: got an unexpected keyword argument 'hh'"),
    ("svip+", "joined by + as in top_k:k=4+svip, got 'svip+' in 'svip+'"),
    ("+svip", "unknown policy '+svip'. Did you mean 'svip'"), ("svip+fallback:x=2", "the stop fallback takes stop, "),
    ("svip+fallback+fallback", "names two fallbacks"),
    ("top_k+svip", "the rule top_k takes k: missing a required argument: 'k'"),
    ("top_k:k=", "expected name:parameter=value,…, each once, joined by + as in top_k:k=4+svip, got 'top_k:k='"),
    ("top_k:", "expected name:parameter=value"),
    ("top_k:k=3,k=4", "each once, joined by + as in top_k:k=4+svip, got 'top_k:k=3,k=4'"),
    ("top_k:k=four", "got 'four'"),
    ("sprinter:threshold=0.7", "the method sprinter takes head, threshold, max_draft, patience: missing a required argument: 'head'"),
    ("svip+sprinter:head=x", "the method sprinter stands first"),
    ("sprinter:tau=0.7,head=x", "unexpected keyword argument 'tau'"),
)  # fmt: skip


def test_what_is_wrong_is_one_line():
    for text, message in WRONG:
        with pytest.raises((ValueError, TypeError), match=r"^[^\n]*$") as error:
            hla.as_policy(text)
        assert message in str(error.value), text


def test_a_list_of_policies():
    listed = 'svip,top_k:k=4+svip:h=0.3,max_draft=8, strict,{"rule": {"name": "top_k", "k": 3}}'
    assert split_policies(listed) == [
        "svip", "top_k:k=4+svip:h=0.3,max_draft=8", "strict", '{"rule": {"name": "top_k", "k": 3}}',
    ]  # fmt: skip
    with pytest.raises(ValueError, match="^expected names of policies with commas between them"):
        split_policies("svip,,strict")
