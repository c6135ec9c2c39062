"""Quantised and packed models: a model's linear layers may be of any class, on target, draft or both; the text is the same model's own."""

import copy
import gc

import pytest
import torch
from support import small, tiny
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.models import packed_linears
from hf_lossy_assist.models.probe import why_not_rows


RAGGED = (9, 1, 4, 14)
NEVER = {"eos_token_id": tiny.NEVER_EMITTED}


class Packed(torch.nn.Module):
    """A linear layer as GPTQ's and AWQ's are: no `torch.nn.Linear`, no `weight`, numbers of four bits packed into int32."""

    def __init__(self, linear):
        super().__init__()
        weight, self.dtype, self.shape = linear.weight.detach(), linear.weight.dtype, linear.weight.shape
        scale = weight.abs().amax(dim=1, keepdim=True) / 7
        codes = (weight / scale).round().clamp(-8, 7).long() + 8
        codes = torch.nn.functional.pad(codes.flatten(), (0, -codes.numel() % 8)).view(-1, 8)
        self.register_buffer("qweight", (codes << (4 * torch.arange(8))).sum(dim=1).sub(2**31).int())
        self.register_buffer("scales", scale)
        self.bias = linear.bias

    def forward(self, x):
        codes = (self.qweight.long() + 2**31)[:, None] >> (4 * torch.arange(8)) & 15
        weight = codes.flatten()[: self.shape.numel()].view(self.shape) - 8
        return torch.nn.functional.linear(x, weight.to(self.dtype) * self.scales, self.bias)


def packed(model, head=False):
    """A copy whose linear layers are `Packed`; `head`: also the one that makes logits."""
    out = copy.deepcopy(model)
    for module in list(out.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, torch.nn.Linear) and (head or name != "lm_head"):
                setattr(module, name, Packed(part))
    out.is_quantized = True
    return out


def check(target, draft, gammas=(1, 4, 12), policy="strict", lowest=0.0):
    """Greedy text in a ragged batch is the target's own `generate`'s, whose rows end apart in every other call."""
    inputs = tiny.prompts(RAGGED)
    whole = tiny.greedy(target, inputs, **NEVER)
    end = {"eos_token_id": int(whole[0, 14 + 5])}
    ended = tiny.greedy(target, inputs, **end)
    for gamma in gammas:
        given, wanted = (end, ended) if gamma % 2 == 0 else (NEVER, whole)
        out = tiny.assisted(target, inputs, draft, policy, num_assistant_tokens=gamma, **given)
        assert torch.equal(out.sequences, wanted), gamma
        assert out.speculation.draft_acceptance_rate >= lowest
    return whole


@pytest.mark.full
@pytest.mark.parametrize(
    "which", ["with the head", *(pytest.param(x, marks=pytest.mark.full) for x in ("target", "draft"))]
)
def test_linear_layers_of_another_class(which):
    model = tiny.shared("llama")
    four = packed(model, head=which == "with the head")
    assert not any(isinstance(part, torch.nn.Linear) for part in four.model.modules())
    assert why_not_rows(four) is None
    target, draft = {"target": (four, model), "draft": (model, four)}.get(which, (four, copy.deepcopy(four)))
    text = check(target, draft, lowest=0.1 if which in ("target", "draft") else 1.0)
    if which == "target":
        assert not torch.equal(text, tiny.greedy(model, tiny.prompts(RAGGED), **NEVER)), "four bits must matter"


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_masks_of_rows_is_sdpa_in_our_forwards(attention):
    model, draft, given = small.llama(), small.llama(), small.ragged() | {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**given)
    for each in (model, draft):
        each.config._attn_implementation = attention
    assert torch.equal(hla.enable(model).generate(**given, assistant_model=draft, lossy_policy="strict"), expected)
    assert model.config._attn_implementation == attention and why_not_rows(model) is None


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
    torch.testing.assert_close(packed_linears.PackedLinear(layer)(x), wanted)


def test_every_linear_layer_is_packed_and_its_weight_given_up():
    target = small.llama().float()
    before = sum(p.numel() for p in target.parameters())
    assert hla.prepack(target) is target
    kinds = [type(part) for part in target.modules()]
    assert torch.nn.Linear not in kinds and kinds.count(packed_linears.PackedLinear) > 7
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
    layer = packed_linears.PackedLinear(linear())
    number = layer.weights.number
    twin, x = copy.deepcopy(layer), torch.randn(3, 48)
    wanted = layer(x)
    del layer
    gc.collect()
    assert torch.equal(twin(x), wanted)
    del twin
    gc.collect()
    assert number not in packed_linears._products


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
