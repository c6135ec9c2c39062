"""`token_type_ids` reach the model as `generate` hands them on; those that cannot be followed are refused."""

import copy

import pytest
import torch
from support import tiny
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CodeGenConfig,
    CodeGenForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import CACHE, cache_of


GPT = tiny.COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ROTARY = {"rotary_dim": 4, "tie_word_embeddings": False}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "is_decoder": True,
}
KINDS = {
    "gpt2": lambda: tiny.gpt2(),
    "gptj": lambda: GPTJForCausalLM(GPTJConfig(**GPT | ROTARY)),
    "codegen": lambda: CodeGenForCausalLM(CodeGenConfig(**GPT | ROTARY)),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(**GPT)),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(**tiny.COMMON | NEO | {"window_size": 256, "max_position_embeddings": 256})
    ),
    "bert": lambda: BertLMHeadModel(BertConfig(**tiny.COMMON | BERT)),
    "ctrl": lambda: CTRLLMHeadModel(CTRLConfig(**GPT | {"dff": 64})),
}
NEVER = {"eos_token_id": tiny.NEVER_EMITTED}


@torch.no_grad()
def build(kind):
    torch.manual_seed(3)
    model = KINDS[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    return model


def typed(lengths, of=2, seed=0):
    inputs = tiny.prompts(lengths)
    types = torch.randint(0, of, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    return inputs | {"token_type_ids": types}


@pytest.mark.full(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_types_are_handed_on_as_generate_does(kind):
    """In batches too, where the model runs in them; CTRL makes types of its own and takes none from outside."""
    model = build(kind)
    draft = tiny.noisy(model, 0.02)
    for lengths in ((9,), (9, 6, 4)) if kind != "ctrl" else ((9,),):
        inputs = typed(lengths)
        expected = tiny.greedy(model, inputs, max_new_tokens=14, **NEVER)
        out = tiny.assisted(model, inputs, draft, max_new_tokens=14, **NEVER)
        assert torch.equal(out.sequences, expected), lengths
        if lengths == (9,) and kind != "ctrl":
            bare = {name: value for name, value in inputs.items() if name != "token_type_ids"}
            assert not torch.equal(expected, tiny.greedy(model, bare, max_new_tokens=14, **NEVER))
    if kind in ("gpt2", "gpt_neo"):  # and where a turn goes on from a cache
        first = tiny.assisted(model, typed((9,)), draft, max_new_tokens=5, **NEVER)
        more = {"input_ids": torch.nn.functional.pad(first.sequences, (0, 2), value=5)}
        more["token_type_ids"] = torch.ones_like(more["input_ids"])
        cache = {CACHE: copy.deepcopy(cache_of(first))}
        expected = tiny.greedy(model, more, **NEVER, **{CACHE: cache_of(first)})
        assert torch.equal(tiny.assisted(model, more, draft, **NEVER, **cache).sequences, expected)


def test_types_beside_holes_packing_and_a_companion():
    model = build("gpt2")
    inputs = typed((9, 9, 9))
    inputs["attention_mask"] = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1, 1, 1], [1] * 9])
    expected = tiny.greedy(model, inputs, **NEVER)
    policy = hla.LossyPolicy(filter=hla.Staged(tiny.noisy(model, 0.01)), stop=hla.Confidence(0.3))
    out = tiny.assisted(model, inputs, tiny.noisy(model, 0.03, seed=4), policy, **NEVER)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    "given, line",
    {
        "another shape": (torch.zeros(1, 4, dtype=torch.long), r"shape \(1, 4\), input_ids \(1, 9\)"),
        "a list": ([[0] * 9], "expected a tensor .* got list"),
        "out of range": (torch.full((1, 9), 2), "type 2 is none of the model's 2"),
        "negative": (torch.full((1, 9), -1), "type -1 is none"),
        "without values": (
            torch.zeros(1, 9, dtype=torch.long, device="meta"),
            "are on meta, input_ids on cpu: move them",
        ),
    }.values(),
)
def test_types_that_do_not_belong_to_the_prompt_are_refused(given, line):
    model = build("bert")
    with pytest.raises((ValueError, TypeError), match=rf"^token_type_ids[^\n]*{line}[^\n]*$"):
        tiny.assisted(model, tiny.prompts((9,)) | {"token_type_ids": given}, model)


def test_tokens_that_see_each_other_do():
    """Gemma 3 gives type 1 to the tokens of a picture, which see each other; its processor gives type 0 to those of a text."""
    text = tiny.DECODER | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 8, "patch_size": 4}, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    for types in (1, 2):
        inputs = typed((9, 7), of=types)
        inputs["token_type_ids"][:, -1] = 0
        out = tiny.assisted(model, inputs, model, max_new_tokens=6, **NEVER)
        assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=6, do_sample=False, **NEVER))
        assert out.speculation.draft_acceptance_rate == 1.0
