"""A model that is changed between two calls: compiled rounds notice whatever a graph of it had taken for granted."""

import copy
import functools
import warnings

import pytest
import torch
from support import tiny
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.models.compiled.signature import Signature, shared
from hf_lossy_assist.models.prepack import PackedLinear


@pytest.fixture(scope="module", autouse=True)
def graphs_are_freed():
    """They would stay with the process as long as it runs."""
    yield
    torch._dynamo.reset()


@functools.cache
def llama(seed):
    return tiny.build("llama", seed, num_hidden_layers=1).float()


def written(target, draft, **how):
    settings = {"do_sample": False, "max_new_tokens": 5, "num_assistant_tokens": 1} | how
    return target.generate(
        **tiny.prompts((5, 3)), **settings, assistant_model=draft, lossy_policy="strict", return_dict_in_generate=True
    )


def head(model):
    model.lm_head = copy.deepcopy(llama(3).lm_head)


def convert(model):
    model.double()


@pytest.mark.full
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("change", [head, convert])
def test_rounds_after_a_change_are_those_of_the_new_model(change):
    """Of a model whose head had been its embedding as well: a graph reads a tensor that stands twice at one place."""
    target, draft = hla.enable(tiny.noisy(llama(0), 0.0)), tiny.noisy(llama(0), 0.05)
    target.lm_head.weight = target.model.embed_tokens.weight
    how = {"compile_config": CompileConfig(backend="eager")}
    first = written(target, draft, **how)
    change(target)
    out, alone = written(target, draft, **how), written(target, draft)
    assert torch.equal(out.sequences, alone.sequences)
    assert change is convert or not torch.equal(out.sequences, first.sequences)  # else the change shows nothing
    assert out.speculation.num_compiled_rounds > 0 and out.speculation.eager_because is None


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def numbered(model):
    model.model.layers[0].self_attn.scaling *= 2


def packed(model):
    model.lm_head = PackedLinear(llama(3).lm_head)


@pytest.mark.parametrize("changes", [(tied,), (numbered,), (packed, packed)])
def test_another_graph_for_each_change(changes):
    model = tiny.noisy(llama(0), 0.0)
    known = [Signature.of(model)]
    assert Signature.of(model).key == known[0].key
    for change in changes:
        change(model)
        known.append(Signature.of(model))
    assert len({signature.key for signature in known}) == len(known)
    assert all(signature.trusted for signature in known)


def test_a_hook_on_every_module_is_run():
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = written(
                hla.enable(tiny.noisy(llama(0), 0.0)), llama(0), compile_config=CompileConfig(backend="eager")
            )
    finally:
        handle.remove()
    assert out.speculation.eager_because == "a forward hook stands on every module" and seen


def test_tensors_that_two_models_share():
    one, other = tiny.noisy(llama(0), 0.0), tiny.noisy(llama(0), 0.0)
    assert shared([Signature.of(one), Signature.of(other)]) == ()
    other.lm_head = one.lm_head
    signatures = [Signature.of(one), Signature.of(other)]
    numbers = (signature.tensors[id(one.lm_head.weight)] for signature in signatures)
    assert shared(signatures) == ((0, 1, *numbers),)
    assert shared([Signature.of(one)]) == ()


def test_the_first_compile_of_a_process_changes_no_signature(monkeypatch):
    """It puts its own constructor into `torch.nn.Module`; the second call would compile all again."""
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, vars(torch.nn.Module)[name])
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    model, before = llama(0), torch.nn.Module.__init__
    known = Signature.of(model).key
    torch._dynamo.mutation_guard.install_generation_tagging_init()
    assert torch.nn.Module.__init__ is not before
    assert Signature.of(model).key == known
