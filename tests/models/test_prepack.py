"""Linear layers packed for the CPU: the same products, for each token by itself, eager and compiled; what cannot be done says so."""

import copy
import gc
import warnings

import pytest
import torch
from support import small
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.generation.shared_scale import shares_scale
from hf_lossy_assist.models import prepack as module


def linear(bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(48, 80, bias=bias)


def packed(dtype: str, bias: bool = True) -> torch.nn.Module:
    return module.LAYOUTS[dtype](linear(bias))


@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_the_product_of_rounded_numbers(bias):
    layer, x = linear(bias), torch.randn(2, 5, 48) * torch.tensor([1e-3, 1.0])[:, None, None]
    scales = layer.weight.abs().amax(dim=1) / 127
    weight = (layer.weight / scales[:, None]).round() * scales[:, None]
    units = x.abs().amax(dim=-1, keepdim=True) / module.LEVELS
    wanted = ((x / units).round() * units) @ weight.T + (layer.bias if bias else 0)
    torch.testing.assert_close(packed("int8", bias)(x), wanted.detach(), rtol=1e-4, atol=1e-5)


def test_in_int8_no_token_depends_on_those_beside_it():
    """Where PyTorch's dynamic quantisation fails: one loud token takes the others' resolution."""
    layer, x = packed("int8"), torch.randn(1, 9, 48)
    x[0, -1] *= 1000
    together = layer(x)
    for i in range(9):
        assert torch.equal(together[:, i], layer(x[:, i : i + 1])[:, 0])
    assert torch.equal(layer(torch.zeros(1, 48))[0], layer.bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_the_product_itself(dtype):
    layer, x = linear().to(getattr(torch, dtype)), torch.randn(2, 5, 48).to(getattr(torch, dtype))
    wanted = layer(x).detach()
    torch.testing.assert_close(module.LAYOUTS[dtype](layer)(x), wanted)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_linear_layer_is_packed_and_its_weight_given_up(dtype):
    target = small.llama().float()
    before = sum(p.numel() for p in target.parameters())
    assert hla.prepack(target, dtype) is target
    kinds = [type(part) for part in target.modules()]
    assert torch.nn.Linear not in kinds and kinds.count(module.LAYOUTS[dtype]) > 7
    assert sum(p.numel() for p in target.parameters()) < before


@pytest.mark.parametrize("compiled", [False, True])
def test_a_small_int8_pair_runs_eagerly_and_compiled(compiled):
    """Here texts are equal; in a deep model they need not be, for what attention rounds otherwise in a block is rounded again."""
    target, draft = hla.prepack(small.llama().float(), "int8"), hla.prepack(small.near(small.llama().float()), "int8")
    how = {"compile_config": CompileConfig(backend="eager"), "num_assistant_tokens": 2} if compiled else {}
    assert not shares_scale(target)
    for seed in range(1 if compiled else 4):
        inputs, settings = small.one(seed=seed), {"do_sample": False, "max_new_tokens": 12}
        alone = type(target).generate(target, **inputs, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = hla.enable(target).generate(
                **inputs, **settings, **how, assistant_model=draft, lossy_policy="strict", return_dict_in_generate=True
            )
        assert torch.equal(out.sequences, alone)
        assert bool(out.speculation.num_compiled_rounds) is compiled, out.speculation.eager_because


def test_copies_share_the_weights_and_the_last_one_takes_them_along():
    layer = packed("int8")
    number = layer.weights.number
    twin, x = copy.deepcopy(layer), torch.randn(3, 48)
    wanted = layer(x)
    del layer
    gc.collect()
    assert torch.equal(twin(x), wanted)
    del twin
    gc.collect()
    assert number not in module._products


def test_what_cannot_be_done_says_so_in_one_line(tmp_path):
    target = small.llama().float()
    with pytest.raises(TypeError, match=r"^prepack: expected a loaded Transformers model, got Linear$"):
        hla.prepack(linear())
    with pytest.raises(ValueError, match=r"^prepack: expected dtype [^\n]*, got 'bfloat16' for float32$"):
        hla.prepack(target, "bfloat16")
    with pytest.raises(ValueError, match=r"^prepack is for the CPU, and this model is on meta[^\n]*$"):
        hla.prepack(small.llama().to("meta"))
    hla.prepack(target)
    with pytest.raises(ValueError, match=r"^a packed model has no weights to save[^\n]*$"):
        target.save_pretrained(tmp_path)
