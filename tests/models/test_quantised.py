"""Quantised and adapted models: a model's linear layers may be of any class, on target, draft or both; the text is the same model's own."""

import copy

import pytest
import torch
from support import small, tiny
from support.tiny import lora, peft_warns

import hf_lossy_assist as hla
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


@pytest.mark.full(every=6)
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("which", ["target", "draft", "both", "with the head"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_linear_layers_of_another_class(name, which):
    model = tiny.shared(name)
    four = packed(model, head=which == "with the head")
    assert not any(isinstance(part, torch.nn.Linear) for part in four.model.modules())
    assert why_not_rows(four) is None
    target, draft = {"target": (four, model), "draft": (model, four)}.get(which, (four, copy.deepcopy(four)))
    text = check(target, draft, lowest=0.1 if which in ("target", "draft") else 1.0)
    if which == "target":
        assert not torch.equal(text, tiny.greedy(model, tiny.prompts(RAGGED), **NEVER)), "four bits must matter"


@pytest.mark.full
def test_other_forwards_of_a_quantised_target():
    """An early exit of it, several prompts as a stream, sampling, a stop that looks at each token."""
    four = hla.enable(packed(tiny.shared("llama")))
    check(four, hla.early_exit(four, 1), gammas=(5,))
    check(four, tiny.shared("llama"), gammas=(5,), policy="svip")
    draft, text = tiny.shared("llama"), tiny.prompts((9,))["input_ids"][0].tolist()
    made = {"assistant_model": draft, "lossy_policy": "strict", "max_new_tokens": 8, "do_sample": False, **NEVER}
    out = list(hla.generate_many(four, [text], **made))[0]
    assert out.token_ids == tiny.greedy(four, tiny.prompts((9,)), max_new_tokens=8, **NEVER)[0, 9:].tolist()
    sampled = four.generate(**tiny.prompts(RAGGED), **made | {"do_sample": True})
    assert sampled.shape == (4, 14 + 8)


@pytest.mark.parametrize("which", ["target", "draft", "both"])
@pytest.mark.parametrize(
    "kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"]
)
def test_torchao(kind, which):
    """Weights of eight bits, activations too (each token's by itself), and weights of four bits."""
    quantization = pytest.importorskip("torchao.quantization")
    made = getattr(quantization, kind, None)
    if made is None:
        pytest.skip(f"this torchao has no {kind}")
    config = made(weight_dtype=torch.int4) if kind.startswith("Intx") else made()
    model = tiny.build("llama").float()
    quantised = copy.deepcopy(model)
    quantization.quantize_(quantised.model, config)
    target, draft = {"target": (quantised, model), "draft": (model, quantised)}.get(which, (quantised, quantised))
    check(target, draft, gammas=(1, 4), lowest=0.1)


# -- adapters -----------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@peft_warns
@pytest.mark.parametrize("which", ["target", "draft", "both"])
def test_lora_for_every_length_of_a_draft(which):
    base = tiny.build("llama")
    target = lora(tiny.build("llama"), 0).double() if which != "draft" else base
    draft = lora(tiny.noisy(base, 0.05), 0).double() if which != "target" else tiny.noisy(base, 0.05)
    text = check(target, draft, gammas=range(1, 13))
    assert which == "draft" or not torch.equal(text, tiny.greedy(base, tiny.prompts(RAGGED), **NEVER))


@pytest.mark.full
@peft_warns
def test_adapters_that_are_switched_between_calls():
    """Each call is written by the adapter that is on, also on the draft; merged into the weights it writes the same."""
    peft = pytest.importorskip("peft")
    model = lora(tiny.build("llama"), 0)
    torch.manual_seed(3)
    model.add_adapter(
        "second", peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.double()
    texts = []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        texts.append(check(model, copy.deepcopy(model), gammas=(4, 5), lowest=1.0))
    assert torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[1])
    merged = model.merge_and_unload()
    assert torch.equal(check(merged, tiny.shared("llama"), gammas=(4,)), texts[0])


# -- attention ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_without_masks_of_rows_is_sdpa_in_our_forwards(attention):
    model, draft, given = small.llama(), small.llama(), small.ragged() | {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**given)
    for each in (model, draft):
        each.config._attn_implementation = attention
    assert torch.equal(hla.enable(model).generate(**given, assistant_model=draft, lossy_policy="strict"), expected)
    assert model.config._attn_implementation == attention and why_not_rows(model) is None
