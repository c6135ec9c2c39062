"""Wrong uses get one line, with what was expected or the way out: a row for each sentence that a user can meet, and the arguments of public names.

Modes that are refused by their names are in test_arguments.py; files of artifacts, drafters and tasks are in the rooms of their readers.
"""

import functools
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import small, sv_models, tiny
from support.small import Listener, llama
from transformers import GenerationConfig, LlamaModel, SynthIDTextWatermarkingConfig

import hf_lossy_assist as hla
from hf_lossy_assist.generation.speculative import one_line_errors
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.policy.json_form import PARTS
from hf_lossy_assist.registry import Names


pytestmark = pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")


@functools.cache
def target():
    return hla.enable(llama(layers=1))


@functools.cache
def draft():
    return llama(layers=1)


@functools.cache
def other():
    return llama(vocab=60)


@functools.cache
def t5():
    return hla.enable(small.t5())


@functools.cache
def short():
    return hla.enable(tiny.build("gpt2", n_positions=16))


def beyond(**settings):
    return generate(short(), assistant_model=short(), **settings)


def ids(rows=1, width=6):
    return torch.arange(4, 4 + rows * width).view(rows, width)


def generate(model=None, **settings):
    """A call that is valid if `settings` are empty; `...` takes an argument out."""
    given = {"input_ids": ids(), "assistant_model": draft(), "lossy_policy": "strict", "max_new_tokens": 8}
    given |= {"do_sample": False} | settings
    return (target() if model is None else model).generate(**{k: v for k, v in given.items() if v is not ...})


def under(policy, **settings):
    return generate(lossy_policy=policy, **settings)


def by_runner(**settings):
    runner = hla.Runner("svip", settings.pop("assistant_model", draft()))
    return generate(draft(), assistant_model=..., lossy_policy=..., custom_generate=runner, **settings)


def by_config(**settings):
    config = GenerationConfig()
    vars(config).update(settings)
    return generate(generation_config=config)


def nested():
    """A list that is too deep to be copied."""
    return functools.reduce(lambda inner, _: [inner], range(3000), [])


def looked_up(**settings):
    return generate(assistant_model=None, prompt_lookup_num_tokens=3, **settings)


def encoded(**settings):
    return generate(t5(), assistant_model=t5(), **settings)


def head(hidden_size=32, **config):
    return hla.LinearHead(hla.HeadConfig(hidden_size, **config))


def verifier(**config):
    return under(hla.Sprinter(head(**config)))


def judged(threshold=0.1, **config):
    judge = {"polarity": "important", "features": hla.FeatureSpec(model="target", position="token")}
    return generate(lossy_policy=hla.AutoJudge(head(**judge | config), threshold))


def sv(made_for=None, companion=None, gamma=4, **settings):
    """With a profile of these models, or of others for one of them."""
    models = {"target": target(), "draft": draft(), "companion": draft()} | (made_for or {})
    profile = sv_models.steep(*models.values(), sv_models.bins(np.random.default_rng(0)))
    return generate(lossy_policy=hla.SpeculativeVerification(profile, companion or draft(), gamma), **settings)


SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)
HERE, MISSING = Path(__file__).parent, "missing a required argument: "
POLICIES = [
    (lambda: llama().generate(ids(), lossy_policy="svip"), r"not used by the model: \['lossy_policy'\]"),
    (lambda: under("svipp"), "unknown policy 'svipp'. Did you mean 'svip'"),
    (lambda: under({"stop": {"name": "svip", "treshold": 1}}), "takes h, c, form, max_draft: .*'treshold'"),
    (lambda: under({"stopp": "svip"}), "unknown entry 'stopp'. Did you mean 'stop'"),
    (lambda: under({"stop": "entropy"}), "unknown stop 'entropy'; there are all_of"),
    (lambda: under(0.3), "expected a LossyPolicy, a rule, .*got 0.3"),
    (lambda: under(hla.SVIP), "expected a LossyPolicy, a rule, .*got <class '[^']*SVIP"),
    (lambda: under("runs/my_polcy"), "no folder 'runs/my_polcy'.*from_pretrained"),
    (lambda: under("{stop: svip}"), "the text is not JSON: "),
    (lambda: hla.LossyPolicy(rule=hla.SVIP()), "LossyPolicy.rule: expected AcceptanceRule, got SVIP"),
    (lambda: hla.SVIP(h=-1), "SVIP.h: expected a number ≥ 0, got -1"),
    (lambda: hla.SVIP(form="x"), "unknown SVIP.form 'x'; there are bound, entropy"),
    (lambda: hla.SVIP(max_draft=2.5), "SVIP.max_draft: expected a whole number of at least 1, got 2.5"),
    (lambda: hla.Confidence(2), "Confidence.threshold: expected a number from 0 to 1, got 2"),
    (lambda: hla.Lenience(0.0), "Lenience.lenience: expected a number above 0 and up to 1, got 0.0"),
    (lambda: under({"rule": "limited"}), f"the rule limited takes .*{MISSING}'rule'"),
    (lambda: hla.Limited(hla.TopK(2), inside=(3, 3)), "Limited.inside: expected two different token ids"),
    (lambda: under(hla.Thresholds(0.1)), "defined for sampling decoding alone.*do_sample=True"),
    (lambda: under(hla.RelaxedTopK(), do_sample=True), "defined for greedy decoding alone.*=False"),
    (lambda: under(hla.OwnRule(lambda dists: dists.px)), "OwnRule: function: expected bool of shape"),
]  # fmt: skip
ARTIFACTS = [
    (lambda: under("sprinter"), f"the method sprinter takes head, .*{MISSING}'head'"),
    (lambda: under({"stop": "head"}), f"the stop head takes head, .*{MISSING}'head'"),
    (lambda: hla.Sprinter("org/name"), "HeadStop.head: expected Head, got 'org/name'"),
    (lambda: verifier(draft=hla.ModelIdentity.of(llama())), "the head was made for the draft .*2 layers.*1 layers"),
    (lambda: judged(target=hla.ModelIdentity.of(llama())), "the head was made for the target "),
    (lambda: head(kind="conv"), "conv"),
    (lambda: head(kind="mlp"), "LinearHead: the config is of kind 'mlp'"),
    (lambda: hla.Sprinter(head(polarity="important")), r"needs P\(acceptable\) from the draft's state"),
    (lambda: judged(polarity="acceptable"), r"needs a head that says P\(important\)"),
    (lambda: judged(features=hla.FeatureSpec(model="companion")), "has no companion here"),
    (lambda: judged(None), "this head names no threshold: choose one"),
    (lambda: verifier(features=hla.FeatureSpec(layer=9, norm=False)), "layer 9 is asked for, .* has 1 blocks"),
    (lambda: hla.FeatureSpec(model="teacher"), "unknown FeatureSpec.model 'teacher'"),
    (lambda: hla.FeatureSpec(layer=2), "layer 2 has no final norm: pass norm=False"),
    (lambda: hla.Head.from_pretrained(HERE), "config.json cannot be read"),
    (lambda: hla.LossyPolicy.from_pretrained(HERE), r"holds no policy \(policy.json\)"),
    (lambda: hla.Sprinter(head()).to_dict(), "never saved has no JSON form: head.save_pretrained"),
    (lambda: hla.SpeculativeVerification("org/name", draft()), "SVFilter.profile: expected Profile"),
    (lambda: sv({"target": llama()}), "the profile was made for the target "),
    (lambda: sv({"draft": llama()}), "the profile was made for the draft "),
    (lambda: sv({"companion": llama()}), "the profile was made for the companion "),
    (lambda: sv(gamma=9), "drafts of up to 8 tokens, and up to 9 may be drafted here"),
    (lambda: sv(num_assistant_tokens=9), "drafts of up to 8 tokens, and up to 9 may"),
    (lambda: sv({"companion": other()}, other()), "the draft has 97 token ids, the companion 60"),
    (lambda: under(hla.Staged(t5())), "a companion must run in batches"),
    (lambda: sv(companion="no such folder"), "no such folder was not loaded"),
    (lambda: under(hla.Staged(3)), "companion: expected a Transformers model .*got 3"),
    (lambda: looked_up(lossy_policy=hla.Staged(draft())), "compares distributions of the draft, and PromptLookup has"),
    (lambda: looked_up(lossy_policy=hla.Sprinter(head())), "AllButLast accepts unchecked .*PromptLookup has none"),
    (lambda: looked_up(lossy_policy=hla.AutoJudge(head(polarity="important"), 0.1)), "state of the draft"),
    (lambda: hla.early_exit(target(), 5), "early_exit.layers: expected fewer than the 1 blocks"),
]  # fmt: skip
MODELS = [
    (lambda: hla.enable(object()), r"expected a Transformers model with generate\(\), got object"),
    (lambda: hla.enable(LlamaModel(draft().config)), r"model with generate\(\), got LlamaModel"),
    (lambda: generate(assistant_model=...), "needs something to draft with: pass assistant_model="),
    (lambda: by_runner(assistant_model=None), "needs something to draft with: pass assistant_model="),
    (lambda: generate(assistant_model="org/draft"), r"from_pretrained\('org/draft'\), got str"),
    (lambda: generate(assistant_model=LlamaModel(draft().config)), "expected a loaded .*got LlamaModel"),
    (lambda: generate(assistant_model=other()), "97 token ids, the assistant 60.*assistant_tokenizer"),
    (lambda: generate(assistant_model=t5()), "and drafts for no decoder"),
    (lambda: generate(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens and assistant_model are two ways"),
    (lambda: generate(speculation_type="dflash"), "speculation_type='dflash' drafts in Transformers' own loop"),
    (lambda: looked_up(lossy_policy="svip"), "SVIP.*PromptLookup has none: use a stop that plans ahead"),
    (lambda: beyond(max_new_tokens=20), "16 positions, and row 0 needs more: its text has 17 tokens"),
    (lambda: beyond(input_ids=ids(2, 17)), "16 positions, and row 0 needs more: its text has 17 tokens"),
    (lambda: generate(hla.enable(llama().to("meta"))), "meta tensor"),
]  # fmt: skip
INPUTS = [
    (lambda: generate(input_ids=[[4, 5, 6]]), "expected token ids of shape .*got list.*return_tensors='pt'"),
    (lambda: generate(input_ids=ids()[0]), r"got torch.int64 of \(6,\)"),
    (lambda: generate(input_ids=ids().float()), r"got torch.float32 of \(1, 6\)"),
    (lambda: generate(input_ids=ids()[:, :0]), r"got torch.int64 of \(1, 0\)"),
    (lambda: generate(input_ids=ids() + 88), "token 97 is outside the target's vocabulary of 97"),
    (lambda: generate(input_ids=ids() - 5), "token -1 is outside the target's vocabulary of 97"),
    (lambda: generate(inputs=ids()), "`inputs`.* were passed alongside input_ids"),
    (lambda: generate(input_ids=...), "`bos_token_id` has to be defined when no `input_ids`"),
    (lambda: generate(input_ids=ids(1, 7), inputs_embeds=torch.zeros(1, 6, 32)), "7 columns, inputs_embeds 6"),
    (lambda: generate(input_ids=..., inputs_embeds=torch.zeros(1, 6, 15)), "size of tensor"),
    (lambda: generate(attention_mask=torch.ones(1, 5)), r"shape \(1, 5\), input_ids \(1, 6\): they must agree"),
    (lambda: generate(attention_mask=torch.ones(1, 1, 6, 6)), r"shape \(1, 1, 6, 6\), input_ids"),
    (lambda: generate(attention_mask=[[1, 1, 1, 1, 1, 1]]), "no attribute 'shape'"),
    (lambda: generate(attention_mask=torch.full((1, 6), 2)), "^attention_mask: expected 1 for a token"),
    (lambda: generate(attention_mask=torch.tensor([[1, 1, -1, 1, 1, 1]])), "^attention_mask: expected 1 for a token"),
    (lambda: generate(attention_mask=torch.full((1, 6), torch.nan)), "^attention_mask: expected 1 for a token"),
    (lambda: encoded(decoder_input_ids=torch.tensor([[0, 2**40]])), "^decoder_input_ids: token 1099511627776 is"),
    (lambda: generate(input_ids=ids(2), attention_mask=torch.tensor([[1] * 6, [0] * 6])), "hides all of row 1"),
    (lambda: generate(pixel_values=torch.zeros(1, 3, 8, 8)), "takes no argument 'pixel_values'"),
    (lambda: generate(**{CACHE: ((torch.zeros(1), torch.zeros(1)),)}), "Passing a tuple"),
]  # fmt: skip
SETTINGS = [
    (lambda: generate(max_new_token=5), "takes no argument 'max_new_token'; did you mean 'max_new_tokens'"),
    (lambda: generate(num_assistant_tokens=0), "num_assistant_tokens: expected a whole number of at least 1, got 0"),
    (lambda: generate(num_assistant_tokens="five"), "num_assistant_tokens: .*got 'five'"),
    (lambda: generate(assistant_confidence_threshold=2), "expected a number from 0 to 1, got 2"),
    (lambda: generate(num_assistant_tokens_schedule="x"), 'expected "constant" or "heuristic", got \'x\''),
    (lambda: under("svip", assistant_confidence_threshold=0.4), "is itself a draft stop, and the policy has"),
    (lambda: generate(assistant_model=None, prompt_lookup_num_tokens=0), "lookup_num_tokens: expected a whole number"),
    (lambda: generate(num_beams=4), "does not run beam search, which num_beams=4 asks for"),
    (lambda: generate(cache_implementation="quantized"), "keeps its own cache, got cache_implementation='quantized'"),
    (lambda: generate(compile_config="fast"), "expected a transformers.CompileConfig, got 'fast'"),
    (lambda: generate(stop_strings=["end"]), "stop_strings=… needs the tokenizer to find them"),
    (lambda: generate(input_ids=ids(2), streamer=Listener()), "a streamer serves one row"),
    (lambda: generate(streamer=3), "'int' object has no attribute 'put'"),
    (lambda: generate(input_ids=ids(2), watermarking_config=SYNTH_ID), "SynthID.* remembers something from token"),
    (lambda: generate(num_return_sequences=3), "Greedy methods .* `num_return_sequences`"),
    (lambda: generate(generation_config={"max_new_tokens": 4}), "__dict__"),
    (lambda: generate(max_new_tokens=0), "`max_new_tokens` must be greater than 0, but is 0"),
    (lambda: generate(max_new_tokens=None, max_length=6), "`max_length` is set to 6"),
    (lambda: generate(eos_token_id="</s>"), "cannot run with these arguments: .*'str'"),
    (lambda: generate(logits_processor=3), "object of type 'int' has no len"),
    (lambda: generate(bad_words_ids=[[97]]), "."),  # behind the vocabulary: known to the processor alone, at its first call
    (lambda: generate(prefix_allowed_tokens_fn=lambda row, ids: []), "."),
    (lambda: generate(early_stopping="x\ny"), "."),
    (lambda: by_config(repetition_penalty=10**400), "."),
    (lambda: by_config(cache_config=nested()), "cannot run with these arguments: RecursionError"),
    # A tokenizer without the word by which Transformers measures tokens:
    (lambda: generate(stop_strings=["a"], tokenizer=small.tokenizer(["a"])), "^stop_strings: .*stopping_criteria=…$"),
    (lambda: generate(stop_strings=[], tokenizer=small.tokenizer()), "^stop_strings: expected"),
    (lambda: generate(do_sample=True, temperature=0), "`temperature` .=0. has to be a strictly positive float"),
]  # fmt: skip


def refusal(call):
    """Return what a wrong use raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


GROUPS = {"policies": POLICIES, "artifacts": ARTIFACTS, "models": MODELS, "inputs": INPUTS, "settings": SETTINGS}


@pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)
def test_a_wrong_use_is_refused_in_one_line(rows):
    wrong = {}
    for call, line in rows:
        message = str(refusal(call))
        if not re.search(line, message) or len(message.splitlines()) != 1 or len(message) > 400 or not message.isprintable():  # fmt: skip
            wrong[line] = message
    assert not wrong


def test_what_a_callers_code_raises_and_errors_that_are_no_refusals_stay():
    def processor(ids, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        generate(logits_processor=[processor])
    for kind in (torch.OutOfMemoryError, UserWarning, OSError, KeyboardInterrupt):
        with pytest.raises(kind), one_line_errors(begun=lambda: False):
            raise kind("x")


def test_the_right_use_beside_them_is_accepted():
    """Otherwise a wrong use could be refused for another reason than the one in its name."""
    assert generate().shape == encoded().shape[:1] + (14,)
    prompts = {"input_ids": ids(2), "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])}
    for use in (generate, by_runner):
        assert use(**prompts).shape == (2, 14) and use(**prompts, do_sample=True).shape == (2, 14)
    assert looked_up().shape == sv().shape == judged().shape == (1, 14)


def test_a_bare_name_is_a_policy_or_is_refused_with_what_it_takes():
    for seam in PARTS:
        for name in Names(seam):
            error = refusal(functools.partial(hla.as_policy, name))
            kind = "method" if name in ("sv", "specdec") else seam  # methods of these names
            line = rf"^lossy_policy: the {kind} {name} takes .*missing a required argument: '\w+'$"
            assert error is None or re.search(line, str(error)), name


def test_a_name_without_an_organisation_is_not_looked_up_on_the_hub(hub):
    for kind in (hla.Head, hla.Profile, hla.LossyPolicy):
        with pytest.raises(ValueError, match=r"no folder 'my_haed' here.*org/name"):
            kind.from_pretrained("my_haed")
    assert not hub.requests


WRONG = (object(), "x", -3, 2.5, float("nan"), True, [], {}, None, "\n", torch.zeros(2))
# Looked at when they are used, with the models at hand.
LATER = {"assistant", "streamer", "tokenizer", "assistant_tokenizer", "cache_given", "numbers", "source"}


def test_a_wrong_argument_gets_one_line():
    """The parameters of rules, stops and filters are tried in policy/test_registry.py."""
    model = {"target": target()}
    needed = {
        "AutoDrafter": {}, "CompositeDrafter": {}, "FeatureSpec": {}, "HeadConfig": {"hidden_size": 32}, "Int8Config": {}, "LinearHead": {},
        "LossyPolicy": {}, "MLPHead": {}, "Runner": {"policy": "svip"}, "SuffixDrafter": {}, "SuffixMemory": {}, "as_policy": {"value": "svip"},
        "early_exit": {"model": target(), "layers": 1}, "enable": {"model": target()}, "generate_many": model | {"prompts": []},
        "in_transformers_loop": model | {"policy": "svip"}, "load": {"source": hla.demo.FOLDER / "draft"}, "prepack": {}, "reports": {},
        "structured": {"grammar": 'root ::= "a"', "tokenizer": small.tokenizer()}, "using": model,
    }  # fmt: skip
    for name, given in needed.items():
        factory = getattr(hla, name)
        for parameter in inspect.signature(factory).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD or parameter.name in LATER:
                continue

            def attempt(value, name=name, factory=factory, given=given, parameter=parameter.name):
                out = factory(**given | {parameter: value})
                return out.__enter__() if name == "in_transformers_loop" else out

            errors = [refusal(functools.partial(attempt, value)) for value in WRONG]
            assert errors[0] is not None, (name, parameter)
            assert all(error is None or len(str(error).splitlines()) == 1 for error in errors), (name, parameter)
