"""Wrong uses of tools/wrong_uses.py, wrong_policies.py and first_mistakes.py, and wrong arguments of every public name, are one line of this package."""

import functools
import inspect
import re

import first_mistakes
import pytest
import refused
import right_use
import torch
import wrong_policies
import wrong_uses
from support.small import tokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.policy.json_form import PARTS
from hf_lossy_assist.registry import KINDS, Names, list_entries


CASES = wrong_uses.CASES | wrong_policies.CASES

# What the line must name, besides being one line.
NAMES = {
    "unknown policy name": r"'svipp'.*'svip'",
    "unknown parameter": r"takes h, c, form, max_draft: .*'treshold'",
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
    "batch of an encoder-decoder, holes in its decoder's prompts": r"this call has 2",
    "max_new_tokens=-3": r"max_new_tokens.*-3",
    "a profile of another target": r"9.*1.*hf-lossy profile",
    "a profile whose seconds end too early": r"latency table was not measured up to γ = 4",
    "a profile whose seconds have a gap": r"latency table has gaps",
    "more drafted tokens than were profiled": r"up to 4.*5.*--gamma 5",
    "a companion of another vocabulary": r"97.*60",
    "GPT-2 past its positions": r"16 positions.*row 0.*17 tokens",
    "a prompt past GPT-2's positions": r"8 positions.*row 0.*9 tokens",
    "companion of a wrong type": r"companion.*got 3",
}


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_is_refused_in_one_line(name):
    error = refused.refusal(CASES[name])
    fault = refused.fault(error)
    assert fault is None, f"{fault}: {error!r}"
    assert re.search(NAMES.get(name, ""), str(error)), str(error)


def test_the_right_use_beside_them_is_accepted():
    """Otherwise a wrong use could be refused for another reason than the one in its name."""
    for model in (right_use.target(), right_use.t5()):
        assistant = {"assistant_model": model} if model is right_use.t5() else {}
        assert right_use.generate(model, **assistant).shape[0] == 1
    prompts = right_use.mask([1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1])
    for use in (right_use.generate, right_use.by_runner):
        assert use(**prompts).shape == (2, 14) and use(**prompts, do_sample=True).shape == (2, 14)
    assert right_use.generate(assistant_model=None, prompt_lookup_num_tokens=3).shape == (1, 14)


LINES = {
    "forgot enable": r"not used by the model: \['lossy_policy'\]",
    "wrong name": r"'svipp'.*Did you mean 'svip'",
    "a rule's name where it needs a number": r"the rule top_k takes k: missing a required argument: 'k'",
    "a method's name without its head": r"the method sprinter takes head, .*missing a required argument: 'head'",
    "a class in place of an object": r"got <class '[^']*SVIP",
    "a draft of another family": r"97.*60.*assistant_tokenizer",
    "the draft's name in place of the draft": r"from_pretrained\('org/draft'\)",
    "no draft at all": r"assistant_model=",
    "a prompt that ends with its image": r"row 0 ends with a piece of an image.*put a token behind it",
    "a folder's name misspelt": r"no folder 'my_haed'.*org/name",
    "a policy's folder misspelt": r"no folder 'runs/my_polcy'.*from_pretrained",
    "prompt lookup with an adaptive stop": r"SVIP.*PromptLookup has none: use a stop that plans ahead",
    "beams": r"num_beams=4",
    "a list in place of a tensor": r"return_tensors='pt'",
    "a setting misspelt": r"'max_new_tokens'",
}


@pytest.mark.parametrize("what", first_mistakes.MISTAKES)
def test_a_first_mistake_prints_one_line_with_the_way_out(what):
    error = refused.refusal(first_mistakes.MISTAKES[what][1])
    assert re.search(LINES[what], str(error)), str(error)
    if what != "forgot enable":  # Transformers' own line: nothing is patched at import
        assert refused.fault(error) is None


@pytest.mark.full(every=3)
@pytest.mark.parametrize(("seam", "name"), [(seam, name) for seam in PARTS for name in Names(seam)])
def test_a_bare_name_is_a_policy_or_is_refused_with_what_it_takes(seam, name):
    try:
        assert isinstance(hla.as_policy(name), hla.LossyPolicy)
    except ValueError as error:
        seam = "method" if name in ("sv", "specdec") else seam  # methods of these names
        assert re.search(rf"^lossy_policy: the {seam} {name} takes .*missing a required argument: '\w+'$", str(error))


def test_a_rule_by_its_bare_name_writes_what_the_object_writes():
    texts = [right_use.generate(lossy_policy=policy) for policy in ("block_verification", hla.BlockVerification())]
    assert texts[0].equal(texts[1])


@pytest.mark.parametrize(
    "load", [hla.Head.from_pretrained, hla.Profile.from_pretrained, hla.LossyPolicy.from_pretrained]
)
def test_a_name_without_an_organisation_is_not_looked_up_on_the_hub(load, hub):
    with pytest.raises(ValueError, match=r"no folder 'my_haed' here.*org/name"):
        load("my_haed")
    assert not hub.requests


def head(**config):
    return hla.LinearHead(hla.HeadConfig(16, **config))


# What a parameter without a default is given while another one is tried.
GIVEN = {
    "head": head, "stop": hla.SVIP, "stops": lambda: (hla.SVIP(),), "rule": hla.Typical, "rules": lambda: (hla.Typical(),),
    "policy": lambda: "svip", "model": right_use.target, "config": lambda: hla.HeadConfig(16), "table": lambda: ((1, 2),),
    "layers": lambda: 1, "hidden_size": lambda: 16, "alpha": lambda: 0.5, "weight": lambda: 0.5, "threshold": lambda: 0.1,
    "budget": lambda: 0.5, "lenience": lambda: 0.5, "k": lambda: 4, "companion": right_use.draft, "given": lambda: "svip",
    "function": lambda: max, "name": lambda: "x", "target": right_use.target, "prompts": list, "tokenizer": tokenizer,
    "source": lambda: hla.demo.FOLDER / "draft", "grammar": lambda: 'root ::= "a"',
}  # fmt: skip
WRONG = (object(), "x", -3, 2.5, float("nan"), True, [], {}, None, "\n", torch.zeros(2))

# Made by the engine and handed to rules and stops, or bases without parameters.
NOT_CALLED_BY_USERS = {
    "Draft",
    "DraftContext",
    "Randomness",
    "Rows",
    "Selection",
    "Verified",
    "Verdict",
    "Distributions",
    "DrafterRun",
    "RuleRun",
    "Result",
    "RowStats",
    "SpeculationStats",
    "AcceptanceProcessor",
    "DraftCriterion",
    "PolicyCandidateGenerator",
    "TransformersLoop",
    "StopRun",
    "StructuredOutput",
}
REGISTERING = {name for name in hla.__all__ if name.startswith("register_")} | {
    "forget"
}  # tests/policy/test_registry.py
COMPILING = {"warmup"}  # tests/generation/test_warmup.py: what is right here compiles
# Looked at when they are used, with the models at hand; `generate` and the wrong uses try those.
LATER = {
    *(("Runner", name) for name in ("assistant", "streamer", "tokenizer", "assistant_tokenizer", "cache_given")),
    ("generate_many", "tokenizer"),
    ("Staged", "companion"), ("OwnRule", "function"), ("disable", "model"), ("is_enabled", "model"), ("load", "source"), ("generate_many", "numbers"),
    *(("ModelIdentity", name) for name in ("id", "revision", "model_type", "hidden_size", "num_layers", "vocab_size")),
}  # fmt: skip
# Of a profile's tables: tests/artifacts; of a drafter's files: tests/drafters.
BY_FILES = {
    "Profile",
    "SVFilter",
    "SpeculativeVerification",
    "sv",
    "Eagle3Drafter",
    "DFlash2Drafter",
    "DFlashDrafter",
    "DSparkDrafter",
    "load_drafter",
    "save_drafter",
}


def parameters():
    for name in hla.__all__:
        factory = getattr(hla, name)
        if not callable(factory) or name in NOT_CALLED_BY_USERS | REGISTERING | BY_FILES | COMPILING:
            continue
        for parameter in inspect.signature(factory).parameters.values():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield name, parameter.name


@functools.cache
def given(name):
    return GIVEN[name]()


@functools.cache
def examples(factory):
    """Return the values that a registry entry gives for parameters that are not in `GIVEN`."""
    found = [entry.example for kind in KINDS for entry in list_entries(kind) if entry.make is factory]
    return {name: value for example in found for name, value in example.items() if name not in GIVEN}


def attempt(name, parameter, value):
    factory = getattr(hla, name)
    needed = [
        p.name for p in inspect.signature(factory).parameters.values() if p.default is p.empty and p.name in GIVEN
    ]
    out = factory(**{**examples(factory), **{p: given(p) for p in needed if p != parameter}, parameter: value})
    return out.__enter__() if name == "in_transformers_loop" else out


@pytest.mark.parametrize(("name", "parameter"), [pair for pair in parameters() if pair not in LATER])
def test_a_wrong_argument_gets_one_line(name, parameter):
    for value in WRONG:
        error = refused.refusal(functools.partial(attempt, name, parameter, value))
        assert error is None or refused.fault(error) is None, f"{value!r}: {error!r}"
    assert refused.refusal(functools.partial(attempt, name, parameter, WRONG[0])) is not None
