"""Linear layers packed for the CPU: the same products, eager and compiled; what cannot be done says so."""

import copy
import gc

import pytest
import torch
from support import small
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.models import packed_linears as module


def linear(bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(48, 80, bias=bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_the_product_itself(dtype):
    layer, x = linear().to(getattr(torch, dtype)), torch.randn(2, 5, 48).to(getattr(torch, dtype))
    wanted, model = layer(x).detach(), small.llama().to(getattr(torch, dtype))
    try:
        torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
    except RuntimeError:  # bfloat16 on a CPU without AVX-512
        with pytest.raises(RuntimeError):
            hla.prepack(model)
        return
    torch.testing.assert_close(module.PackedLinear(layer)(x), wanted)


def test_every_linear_layer_is_packed_and_its_weight_given_up():
    target = small.llama().float()
    before = sum(p.numel() for p in target.parameters())
    assert hla.prepack(target) is target
    kinds = [type(part) for part in target.modules()]
    assert torch.nn.Linear not in kinds and kinds.count(module.PackedLinear) > 7
    assert sum(p.numel() for p in target.parameters()) < before


@pytest.mark.full
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_packed_pair_writes_what_it_wrote_eagerly_and_compiled(compiled):
    inputs, settings = small.one(), {"do_sample": False, "max_new_tokens": 12}
    alone = small.llama().float().generate(**inputs, **settings)
    target, draft = hla.prepack(small.llama().float()), hla.prepack(small.near(small.llama().float()))
    how = {"compile_config": CompileConfig(backend="eager"), "num_assistant_tokens": 2} if compiled else {}
    assert torch.equal(type(target).generate(target, **inputs, **settings), alone)
    out = hla.enable(target).generate(
        **inputs, **settings, **how, assistant_model=draft, lossy_policy="strict", return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, alone)
    assert bool(out.speculation.num_compiled_rounds) is compiled, out.speculation.eager_because


@pytest.mark.full
def test_copies_share_the_weights_and_the_last_one_takes_them_along():
    layer = module.PackedLinear(linear())
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
    hla.prepack(target)
    assert target.to("cpu").float() is target
    for move in (lambda: target.to("meta"), target.half):
        with pytest.raises(ValueError, match=r"^a packed model stays on the CPU in float32: [^\n]*$"):
            move()
    with pytest.raises(ValueError, match=r"^a packed model has no weights to save[^\n]*$"):
        target.save_pretrained(tmp_path)
    target = hla.prepack(small.llama().float())
    with pytest.raises(ValueError, match=r"^a packed model takes no other weights[^\n]*$"):
        target.load_state_dict(small.llama().state_dict(), strict=False)


def test_a_layer_in_two_places_is_packed_once():
    target = small.llama().float()
    target.model.layers[0].mlp.up_proj = target.model.layers[0].mlp.gate_proj
    hla.prepack(target)
    assert target.model.layers[0].mlp.up_proj is target.model.layers[0].mlp.gate_proj


def test_layers_that_do_more_than_their_product_stay():
    target, seen = small.llama().float(), []
    parts = [part for part in target.modules() if type(part) is torch.nn.Linear][:4]
    hooked, patched, wide, plain = parts
    hooked.register_forward_hook(lambda *_: seen.append(1))
    patched.forward = torch.nn.Linear.forward.__get__(patched)
    wide.double()
    hla.prepack(target)
    left = [part for part in target.modules() if type(part) is torch.nn.Linear]
    assert {id(part) for part in left} == {id(hooked), id(patched), id(wide)} and plain not in left


def test_a_packed_model_cannot_be_trained():
    target = hla.prepack(small.llama().float())
    loss = target(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
