"""Facts of a model are found once, and again after each change that they depend on."""

import copy
import gc
import inspect
import sys
import weakref

import pytest
import torch
from support import small, tiny
from torch import nn

import hf_lossy_assist as hla
from hf_lossy_assist.models import introspection
from hf_lossy_assist.models.facts import facts_of
from hf_lossy_assist.models.introspection import looking_once, remember


def replaced_layer(model):
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)


def another_class(model):
    kind = type(model.model.layers[0].mlp)
    model.model.layers[0].mlp.__class__ = type("Other", (kind,), {})


def replaced_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states, forward=mlp.forward: forward(states)


def changed_rope(model):
    model.model.rotary_emb.rope_type = "dynamic"


CHANGES = {
    "precision": lambda model: model.to(torch.bfloat16), "device": lambda model: model.to("meta"),
    "a setting": lambda model: setattr(model.config, "num_hidden_layers", 1),
    "an entry of a setting": lambda model: model.config.rope_parameters.update(rope_theta=7.0),
    "attention": lambda model: model.set_attn_implementation("eager"), "a layer": replaced_layer,
    "a class": another_class, "a forward": replaced_forward, "RoPE": changed_rope,
    "a parameter that is none": lambda model: model.model.norm.register_parameter("weight", None),
    "a buffer's module": lambda model: model.model.add_module("more", nn.Identity()),
}  # fmt: skip


def test_a_change_is_seen():
    for name, change in CHANGES.items():
        model, count = small.llama(), []
        facts = facts_of(model)
        remember(model, "count", lambda count=count: count.append(1))
        assert facts_of(model) is facts
        change(model)
        remember(model, "count", lambda count=count: count.append(1))
        assert len(count) == 2, name


def test_values_of_weights_and_hooks_are_no_change():
    model = small.llama()
    facts = facts_of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    model.train()
    hook = model.model.layers[0].register_forward_hook(lambda *args: None)
    assert facts_of(model) is facts
    hook.remove()


def test_a_call_looks_once_at_each_model(monkeypatch):
    looked, original = [], introspection._look
    monkeypatch.setattr(introspection, "_look", lambda base: looked.append(id(base)) or original(base))
    target, draft = hla.enable(small.llama()), small.near(small.llama())
    for policy in ("strict", "svip"):
        target.generate(**small.ragged(), assistant_model=draft, lossy_policy=policy, max_new_tokens=4)
        looked.clear()
        target.generate(**small.ragged(), assistant_model=draft, lossy_policy=policy, max_new_tokens=4)
        assert sorted(looked) == sorted([id(target), id(draft)])


def test_a_repeated_call_reads_no_signature(monkeypatch):
    """Transformers reads its own."""
    target, draft, read = hla.enable(small.llama()), small.near(small.llama()), []
    settings = {"assistant_model": draft, "lossy_policy": "svip", "max_new_tokens": 4}
    target.generate(**small.ragged(), **settings)
    signature = inspect.signature

    def counted(*args, **kwargs):
        read.append(sys._getframe(1).f_globals["__name__"])
        return signature(*args, **kwargs)

    monkeypatch.setattr(inspect, "signature", counted)
    target.generate(**small.ragged(), **settings)
    assert read and not [name for name in read if name.startswith("hf_lossy_assist")]


def test_within_the_context_a_change_is_not_looked_for():
    model = small.llama()
    with looking_once(model, None, "no model"):
        facts = facts_of(model)
        model.config.num_hidden_layers = 1
        assert facts_of(model) is facts
    assert facts_of(model) is not facts


@pytest.mark.full
def test_facts_keep_no_model_alive():
    model = tiny.build("llama")
    facts_of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
