"""Warnings that a user gets once."""

import re
import warnings

import numpy as np
import pytest
import torch
from support import small
from support.small import llama, near, one
from support.sv_models import bins, steep
from torch.ao.quantization import quantize_dynamic
from transformers import GenerationConfig
from transformers.generation import stopping_criteria

import hf_lossy_assist as hla
from hf_lossy_assist.generation import model_checks
from hf_lossy_assist.generation.model_checks import shares_scale
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.models.packed_linears import int8


SETTINGS = {"max_new_tokens": 6, "do_sample": False}
SAME_MODEL, TRAINS = "the target is its own draft", "in training mode"


def write(where, target, draft):
    if where == "generate":
        return hla.enable(target).generate(**one(), **SETTINGS, assistant_model=draft, lossy_policy="strict")
    if where == "generate_many":
        ours = {"assistant_model": draft, "lossy_policy": "strict"}
        return list(hla.generate_many(target, [[4, 5, 6], [7, 8, 9, 10]], **SETTINGS, **ours))
    return target.generate(**one(), **SETTINGS, custom_generate=hla.Runner("strict", draft))


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found if re.search(f"{SAME_MODEL}|{TRAINS}", str(each.message))]


@pytest.mark.full
@pytest.mark.parametrize("where", ["generate", "generate_many", "a runner"])
def test_once_for_each_model(where):
    def lines(target, draft):
        return warned(lambda: write(where, target, draft))

    for _ in range(2):  # models of its own each time
        target = llama()
        assert [SAME_MODEL in line for line in lines(target, target)] == [True] and lines(target, target) == []
        draft = near(target).train()
        [line] = lines(target, draft)
        assert line.startswith("the assistant is in training mode") and line.endswith("call eval() first")
        target.train()
        [line] = lines(target, draft)
        assert line.startswith("the target is in training mode") and lines(target, draft) == []


def test_a_target_beyond_its_length_is_warned_of_as_by_transformers(monkeypatch):
    """Once in a process, which Transformers counts."""
    seen = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", seen.append)
    target = hla.enable(llama(max_position_embeddings=16))
    for more in (7, 12):
        target.generate(**one(), max_new_tokens=more, do_sample=False, assistant_model=near(target), lossy_policy="strict")  # fmt: skip
        assert len(seen) == (more == 12)
    assert "maximum length (16)" in seen[0]


def test_early_exits_and_the_demo_are_not_warned_of():
    target, demo = hla.enable(llama(layers=3)), hla.demo.load()
    for model, drafting in (
        (target, {"assistant_model": hla.early_exit(target, 1)}), (target, {"assistant_early_exit": 1}),
        (hla.enable(demo.target), {"assistant_model": demo.draft}),
    ):  # fmt: skip
        ours = SETTINGS | drafting | {"lossy_policy": "strict"}
        assert warned(lambda model=model, ours=ours: model.generate(torch.arange(4, 12)[None], **ours)) == []


def test_a_hidden_last_token_is_named_once(monkeypatch):
    monkeypatch.setattr(model_checks, "_warned", set())
    target, draft, inputs = hla.enable(llama()), near(llama()), small.ragged((0, 0))
    inputs["attention_mask"][1, -2:] = 0
    ours = SETTINGS | {"assistant_model": draft, "lossy_policy": "strict"}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            target.generate(**inputs, **ours)
            target.generate(**inputs, **SETTINGS, custom_generate=hla.Runner("strict", draft))
        target.generate(**small.ragged((0, 3)), **ours)
    lines = [line for line in found if str(line.message).startswith("attention_mask hides the last token of row 1: ")]
    assert len(lines) == 1


@pytest.mark.parametrize("trained", [True, False], ids=["sampling", "greedy decoding"])
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_head_for_other_decoding_is_named_in_every_entrance(trained, monkeypatch):
    """Once for each head, with the command that makes data for this decoding."""
    here, target = not trained, llama()
    settings = {"max_new_tokens": 3, "do_sample": here, "assistant_model": near(target)}

    def run(where, head):
        policy, inputs = {"lossy_policy": head}, one()
        if where == "generate_many":
            return list(hla.generate_many(target, [[4, 5, 6]], **settings, **policy))
        if where == "a runner":
            runner = hla.Runner(head, near(target))
            return target.generate(**inputs, **settings | {"assistant_model": None}, custom_generate=runner)
        if where == "Transformers' loop":
            with hla.in_transformers_loop(target, head):
                return target.generate(**inputs, **settings)
        if where == "a config":
            config = GenerationConfig(do_sample=here, max_new_tokens=3)
            inputs |= {"generation_config": config, "assistant_model": near(target)}
        return hla.enable(target).generate(**inputs, **policy, **settings if where == "generate" else {})

    names = ("greedy decoding", "sampling")
    wanted = f"the head was trained for {names[trained]}, and this is {names[here]}: it knows these texts less well; hf-lossy collect --"
    for where in ("generate", "generate_many", "a runner", "Transformers' loop", "a config"):
        monkeypatch.setattr(model_checks, "_warned", set())
        head = hla.LinearHead(hla.HeadConfig(32, decoding={"do_sample": trained})).eval()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run(where, head), run(where, head)
        [line] = [str(w.message) for w in found if "was trained for" in str(w.message)]
        assert line.startswith(wanted) and ("--do-sample makes" if here else "--greedy makes") in line, where


LINE = r"^the {}'s activations are quantised by a scale that the tokens of a forward share, [^\n]*; quantise its weights alone$"


def quantised(seed: int = 0):
    """A tiny Llama whose linear layers compute in int8, all tokens on one scale (PyTorch's `quantize_dynamic`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(small.llama(seed).float(), {torch.nn.Linear}, dtype=torch.qint8)


def written(target, draft, policy="strict", **settings):
    settings = {"do_sample": False, "max_new_tokens": 6} | settings
    return hla.enable(target).generate(**small.one(), assistant_model=draft, lossy_policy=policy, **settings)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_target_whose_tokens_share_a_scale_is_named_once():
    """Another object again; a model that is quantised after a call is looked at again."""
    for target in (quantised(), quantised(), small.llama().float()):
        draft = small.near(small.llama().float())
        if not shares_scale(target):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                written(target, draft)
            for block, computed in zip(target.model.layers, quantised().model.layers, strict=True):
                block.mlp, block.self_attn = computed.mlp, computed.self_attn  # in place, as quantize_dynamic can
        with pytest.warns(UserWarning, match=LINE.format("target")) as seen:
            for policy in ("strict", "strict", hla.TopK(3)):
                written(target, draft, policy)
        assert [each.filename for each in seen if "share" in str(each.message)] == [__file__]


@pytest.mark.filterwarnings("error")
def test_no_other_model_is():
    """Neither our int8, with a scale for each token, nor weights of 8 bits alone, nor a draft: its laws are those that its tokens were drawn from."""

    class WeightsAlone(torch.nn.Linear):
        def forward(self, x):
            scale = self.weight.abs().amax(dim=1, keepdim=True) / 127
            return x @ ((self.weight / scale).round() * scale).T

    WeightsAlone.__module__ = "quantised.weights"
    target = small.llama()
    assert not shares_scale(target)
    for block in target.model.layers:
        block.mlp.down_proj.__class__ = WeightsAlone
    written(target, small.near(small.llama()))
    assert not shares_scale(target)
    written(small.llama(), quantised())
    eight, draft = int8(small.llama()), small.near(small.llama())
    assert not shares_scale(eight)
    written(eight, draft)
    written(small.llama(), int8(draft))
    written(small.llama(), draft, hla.as_policy(hla.Staged(int8(small.llama()))), do_sample=True, top_k=0)


def test_a_quantised_model_that_could_not_be_tried_is_named():
    class Quantised(torch.nn.Linear):
        pass

    target, draft = small.llama(), small.near(small.llama())
    target.model.layers[0].mlp.down_proj.__class__ = Quantised
    whole = target.forward

    def forward(input_ids=None, **others):
        if others.get(CACHE) is None:
            raise ValueError("this model needs more than tokens")
        return whole(input_ids=input_ids, **others)

    target.forward = forward
    assert shares_scale(target)
    with pytest.warns(UserWarning, match=r"^the target's activations are quantised by a [^\n]* or may share") as seen:
        for _ in range(2):
            written(target, draft)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["sv", "staged"])
def test_a_companion_matters_in_sampling_alone(kind):
    target, draft, companion = small.llama(), small.near(small.llama()), quantised()
    policy = hla.as_policy(hla.Staged(companion))
    if kind == "sv":
        profile = steep(target, draft, companion, bins(np.random.default_rng(0)))
        policy = hla.SpeculativeVerification(profile, companion, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(target, draft, policy)
    with pytest.warns(UserWarning, match=LINE.format("companion")):
        written(target, draft, policy, do_sample=True, top_k=0)
