"""`tools/first_mistakes.py`: each mistake's line names what was wrong and the way out; and policies by bare names."""

import json
import re

import first_mistakes
import pytest
import refused
import right_use

import hf_lossy_assist as hla
from hf_lossy_assist.policy.serialise import PARTS
from hf_lossy_assist.registry import Names


LINES = {
    "forgot enable": r"not used by the model: \['lossy_policy'\]",
    "wrong name": r"'svipp'.*Did you mean 'svip'.*sprinter.*top_k.*heuristic.*staged",
    "a rule's name where it needs a number": r"needs k.*'top_k:k=4'",
    "a method's name without its head": r"sprinter needs a head.*--head",
    "a class in place of an object": r"class SVIP.*SVIP\(",
    "a draft of another family": r"97.*60.*assistant_tokenizer",
    "the draft's name in place of the draft": r"from_pretrained\('org/draft'\)",
    "no draft at all": r"assistant_model=",
    "a prompt that ends with its image": r"row 0 ends with a piece of an image.*put a token behind it",
    "a folder's name misspelt": r"no folder 'my_haed'.*org/name",
    "a policy's folder misspelt": r"no folder 'runs/my_polcy'.*from_pretrained",
    "prompt lookup with an adaptive stop": r"SVIP.*PromptLookup has none: use a stop that plans ahead",
    "beams": r"num_beams=4",
    "a batch padded on the right": r"padding_side='left'",
    "a list in place of a tensor": r"return_tensors='pt'",
    "a setting misspelt": r"'max_new_tokens'",
}


@pytest.mark.parametrize("what", first_mistakes.MISTAKES)
def test_a_first_mistake_prints_one_line_with_the_way_out(what):
    error = refused.refusal(first_mistakes.MISTAKES[what][1])
    assert re.search(LINES[what], str(error)), str(error)
    if what != "forgot enable":  # Transformers' own line: nothing is patched at import
        assert refused.fault(error) is None


def test_the_script_prints_them_all(capsys, monkeypatch):
    assert first_mistakes.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(LINES)
    accepted = {"no mistake": ("nothing", lambda: None)}
    monkeypatch.setattr(first_mistakes, "MISTAKES", accepted)
    assert first_mistakes.main() == 1


@pytest.mark.full(every=3)
@pytest.mark.parametrize(("seam", "name"), [(seam, name) for seam in PARTS for name in Names(seam)])
def test_a_bare_name_is_a_policy_or_is_told_how_to_write_it(seam, name):
    try:
        policy = hla.as_policy(name)
    except ValueError as error:
        line = str(error)
        assert "\n" not in line
        if name in ("sv", "specdec", "moving_average"):  # lines of their own
            assert re.search("needs a profile and a companion|needs a head: pass head=…|what do rounds cost", line)
            return
        assert f"{name} is a {seam} that needs" in line
        written = re.search(r"lossy_policy='(.*)'$", line)[1]
        if not written.startswith("{"):
            assert hla.as_policy(written).to_dict()[seam]["name"] == name
            return
        form = json.loads(written)
        assert form[seam]["name"] == name
        if "folder or org/name" not in form[seam].values():
            assert hla.as_policy(form).to_dict()[seam]["name"] == name
    else:
        assert name in ("strict", "fallback") or policy == hla.LossyPolicy(**{seam: Names(seam)[name]()})


def test_a_rule_by_its_bare_name_writes_what_the_object_writes():
    texts = [right_use.generate(lossy_policy=policy) for policy in ("block_verification", hla.BlockVerification())]
    assert texts[0].equal(texts[1])


@pytest.mark.parametrize(
    "load", [hla.Head.from_pretrained, hla.Profile.from_pretrained, hla.LossyPolicy.from_pretrained]
)
def test_a_name_without_an_organisation_is_not_asked_for_on_the_hub(load, hub):
    with pytest.raises(ValueError, match=r"no folder 'my_haed' here.*org/name"):
        load("my_haed")
    assert not hub.requests
