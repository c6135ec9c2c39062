"""Every wrong use of `tools/wrong_uses.py` and `wrong_policies.py` is refused in one line, by this package, and the script itself can fail."""

import re

import pytest
import refused
import right_use
import torch
import wrong_policies
import wrong_uses


CASES = wrong_uses.CASES | wrong_policies.CASES

# What the line must name, besides being one line.
NAMES = {
    "unknown policy name": r"'svipp'.*'svip'",
    "unknown parameter": r"'treshold'.*max_draft",
    "unknown entry": r"'stopp'.*'stop'",
    "draft given as a name": r"assistant_model.*str",
    "draft of another vocabulary": r"97.*60.*assistant_tokenizer",
    "NaN weights in the target": r"target.*row 1\b",
    "NaN weights in the draft": r"draft.*row 1\b",
    "token outside the vocabulary": r"106.*97",
    "negative token": r"-1.*97",
    "mask of another shape": r"\(1, 5\).*\(1, 6\)",
    "mask that hides a whole row": r"row 1\b",
    "num_assistant_tokens='five'": r"num_assistant_tokens.*'five'",
    "num_beams=4": r"num_beams=4",
    "batch of an encoder-decoder, holes in its decoder's prompts": r"batch has 2",
    "top_p=2": r"top_p.*2",
    "max_new_tokens=-3": r"max_new_tokens.*-3",
    "a profile of another target": r"9.*1.*hf-lossy profile",
    "a profile whose seconds end too early": r"latency table was not measured up to γ = 4",
    "a profile whose seconds have a gap": r"latency table has gaps",
    "more drafted tokens than were profiled": r"up to 4.*5.*--gamma 5",
    "a companion of another vocabulary": r"97.*60",
    "target on meta": r"target is on the meta device",
    "draft on meta": r"assistant is on the meta device",
    "draft that reads the target's states": r"StatesReader drafts from the target",
    "draft without a text to read": r"NoiseReader drafts from the target",
    "GPT-2 past its positions": r"16 positions.*row 0.*17 tokens",
    "a prompt past GPT-2's positions": r"8 positions.*row 0.*9 tokens",
    "companion of a wrong type": r"companion.*got 3",
    "tokenizer given as a name": r"tokenizer.*AutoTokenizer.*'a'",
    "streamer given as a number": r"streamer.*TextStreamer.*3",
    "do_sample='yes'": r"do_sample: expected True or False, got 'yes'",
}


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_is_refused_in_one_line(name):
    error = refused.refusal(CASES[name])
    fault = refused.fault(error)
    assert fault is None, f"{fault}: {error!r}"
    assert re.search(NAMES.get(name, ""), str(error)), str(error)


def test_every_name_belongs_to_a_case():
    assert NAMES.keys() <= CASES.keys() and not wrong_uses.CASES.keys() & wrong_policies.CASES.keys()


def test_the_right_use_beside_them_is_accepted():
    """Otherwise a wrong use could be refused for another reason than the one in its name."""
    for model in (right_use.target(), right_use.t5()):
        assistant = {"assistant_model": model} if model is right_use.t5() else {}
        assert right_use.generate(model, **assistant).shape[0] == 1
    prompts = right_use.mask([1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1])
    for use in (right_use.generate, right_use.by_runner):
        assert use(**prompts).shape == (2, 14) and use(**prompts, do_sample=True).shape == (2, 14)
    assert right_use.generate(assistant_model=None, prompt_lookup_num_tokens=3).shape == (1, 14)


def two_lines():
    raise ValueError("one\ntwo")


def test_the_script_finds_each_kind_of_fault(capsys):
    faults = {
        "accepted": (lambda: None, "it was accepted"),
        "other type": (lambda: {}["key"], "a KeyError, neither ValueError nor TypeError"),
        "two lines": (two_lines, "2 lines"),
        "from torch": (lambda: torch.nn.Linear(2, 2).load_state_dict(3), "found out only in modules/module.py"),
    }
    for call, found in faults.values():
        assert refused.fault(refused.refusal(call)) == found
    assert refused.main({name: call for name, (call, _) in faults.items()}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(faults) + 1 and lines[0] == " 1 accepted: NoneType: None"
    good = "unknown policy name"
    assert refused.main({good: lambda: right_use.generate(lossy_policy="svipp")}) == 0
    assert re.match(r" 1 unknown policy name: ValueError: .*'svip'", capsys.readouterr().out)
