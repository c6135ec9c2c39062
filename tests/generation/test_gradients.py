"""No forward of a call records gradients, and what stays behind in a model or a cache can be copied, trained and used like any tensor."""

import copy

import pytest
import torch
from support import tiny
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import CACHE, cache_of


def watch(*models):
    """What each forward of `models` finds: [(gradients are on, inference mode is on), …]."""
    seen = []
    for model in models:
        model.register_forward_pre_hook(
            lambda *_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        )
    return seen


def run(target, draft, **settings):
    given = {"assistant_model": draft, "lossy_policy": "strict", "max_new_tokens": 12, "do_sample": False}
    return hla.enable(target).generate(**tiny.prompts((9,)), **given | settings, return_dict_in_generate=True)


@pytest.mark.parametrize("how", ["llama", "a cache passed in", "t5", "lfm2", "lfm2 as draft", "quantised"])
def test_no_forward_records_gradients(how):
    name = how if how in tiny.ONE_ROW else "llama"
    target = tiny.build(name)
    draft = tiny.build("lfm2") if how == "lfm2 as draft" else copy.deepcopy(target)
    if how == "quantised":
        target.is_quantized = True
    seen = watch(target, draft)
    cache = {CACHE: DynamicCache(config=target.config)} if how == "a cache passed in" else {}
    out = run(target, draft, **cache)
    assert seen and not any(gradients for gradients, _ in seen)
    again = copy.deepcopy(cache_of(out))  # fails for tensors with a graph behind them
    assert again.get_seq_length() == cache_of(out).get_seq_length() > 9 * (name != "t5")


def test_a_graph_that_the_caller_builds_around_the_call_is_left_alone():
    """Gradients that are on outside are on again afterwards, and parameters get none from the call."""
    target = tiny.build("llama")
    with torch.enable_grad():
        run(target, target, **{CACHE: DynamicCache(config=target.config)})
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize("which", ["target", "draft", "companion"])
def test_a_quantised_model_never_runs_in_inference_mode(which):
    """It may keep what it makes at its first forward, and an inference tensor would spoil it for training."""
    models = {name: tiny.build("llama", seed) for seed, name in enumerate(("target", "draft", "companion"))}
    models[which].is_quantized = True
    seen = watch(models[which])
    policy = hla.LossyPolicy(filter=hla.Staged(models["companion"]))
    run(models["target"], models["draft"], lossy_policy=policy)
    assert seen and not any(inference for _, inference in seen)
