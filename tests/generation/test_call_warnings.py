"""Warnings that a user gets once: of a target that drafts for itself, models in training mode, and quantised models whose tokens share a scale."""

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
    return [
        line
        for warning in found
        for line in [str(warning.message)]
        if any(words in line for words in (SAME_MODEL, TRAINS))
    ]


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
    target, texts = hla.enable(llama(layers=3)), []
    expected = target.generate(**one(), **SETTINGS)
    demo, inputs = hla.demo.load(), {"input_ids": torch.arange(4, 12)[None]}
    hla.enable(demo.target)

    def lines(model, inputs, **settings):
        return warned(lambda: texts.append(model.generate(**inputs, **SETTINGS, **settings, lossy_policy="strict")))

    assert lines(target, one(), assistant_model=hla.early_exit(target, 1)) == []
    assert lines(target, one(), assistant_early_exit=1) == []
    assert all(torch.equal(text, expected) for text in texts)
    assert lines(demo.target, inputs, assistant_model=demo.draft) == []


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
        policy = {"lossy_policy": head}
        if where == "generate_many":
            return list(hla.generate_many(target, [[4, 5, 6]], **settings, **policy))
        if where == "a runner":
            return target.generate(
                **one(), **settings | {"assistant_model": None}, custom_generate=hla.Runner(head, near(target))
            )
        if where == "Transformers' loop":
            with hla.in_transformers_loop(target, head):
                return target.generate(**one(), **settings)
        config = (
            {"generation_config": GenerationConfig(do_sample=here, max_new_tokens=3)}
            if where == "a config"
            else settings
        )
        return hla.enable(target).generate(**one(), **config | {"assistant_model": near(target)}, **policy)

    names = ["sampling", "greedy decoding"] if trained else ["greedy decoding", "sampling"]
    wanted = f"the head was trained for {names[0]}, and this is {names[1]}: it knows these texts less well; hf-lossy collect --"
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


def test_the_target_is_named_once():
    target, draft = quantised(), small.near(small.llama())
    with pytest.warns(UserWarning, match=LINE.format("target")) as seen:
        written(target, draft)
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(target, draft)
    with pytest.warns(UserWarning, match=LINE.format("target")):  # another object
        written(quantised(), draft)


@pytest.mark.filterwarnings("error")
def test_our_int8_has_a_scale_for_each_token():
    target, draft = int8(small.llama()), small.near(small.llama())
    assert not shares_scale(target)
    written(target, draft)
    written(small.llama(), int8(draft))
    companion = hla.as_policy(hla.Staged(int8(small.llama())))
    written(small.llama(), draft, companion, do_sample=True, top_k=0)


def test_a_model_that_is_quantised_after_a_call_is_looked_at_again():
    target, draft = small.llama().float(), small.near(small.llama().float())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(target, draft)
    for block, computed in zip(target.model.layers, quantised().model.layers, strict=True):
        block.mlp, block.self_attn = computed.mlp, computed.self_attn  # in place, as quantize_dynamic can
    with pytest.warns(UserWarning, match=LINE.format("target")):
        written(target, draft)


@pytest.mark.filterwarnings("error")
def test_no_other_model_is():
    class WeightsAlone(torch.nn.Linear):
        """Weights of 8 bits, activations as they are."""

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
    written(small.llama(), quantised())  # a draft's laws are those that its tokens were drawn from


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
    with pytest.warns(
        UserWarning, match=r"^the target's activations are quantised by a scale [^\n]* or may share[^\n]*$"
    ) as seen:
        for _ in range(2):
            written(target, draft)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_lossy_policy_warns_itself():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        written(quantised(), small.near(small.llama()), hla.TopK(3))
    assert not [w for w in seen if "share" in str(w.message)]


@pytest.mark.parametrize("kind", ["sv", "staged"])
def test_a_companion_matters_in_sampling_alone(kind):
    target, draft, companion = small.llama(), small.near(small.llama()), quantised()
    policy = hla.as_policy(hla.Staged(companion))
    if kind == "sv":
        policy = hla.SpeculativeVerification(
            steep(target, draft, companion, bins(np.random.default_rng(0))), companion, 5
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(target, draft, policy)
    with pytest.warns(UserWarning, match=LINE.format("companion")):
        written(target, draft, policy, do_sample=True, top_k=0)
