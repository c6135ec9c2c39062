"""Tiny random models: quick enough to build for every test, and large enough in their weights that argmax keeps changing.

They compute in float64: in float32 the last bits depend on the processor's instruction set and on the number of threads, and with
weights this large a block forward and a one-token forward can then differ by 1e-3. The demo's trained models prove float32.

A freshly initialised model repeats one token for ever, and a test of equality would then pass for almost any engine. So the
weights are scaled up (`STRETCH`), and `test_equality` checks that its reference texts vary and that no choice in them is so
close that rounding could turn it.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


VOCABULARY, PAD, EOS = 97, 0, 3
STRETCH = {"t5": 10.0, "lfm2": 8.0}  # of every matrix; 3 for the others
# Of the logits; 6 for the others: laws neither flat nor certain, so that draft stops differ.
SHARPEN = {"t5": 0.2, "lfm2": 4.0}
# In float64 Transformers' eager softmax turns the mask of a padding token into −inf, and its row into NaN.
FLOAT32 = {"gemma2"}
WINDOW = 8  # of the models with sliding windows; every text in the tests is longer

NEVER_EMITTED = VOCABULARY + 5  # as eos: every row runs to its full length
NEW = 24  # new tokens, unless a test asks for others

COMMON = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 1}
DECODER = COMMON | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
WINDOWED = {"head_dim": 8, "sliding_window": WINDOW}
BATCHED: dict[str, dict[str, Any]] = {  # what each has beside `COMMON`
    "llama": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER | {"head_dim": 8},
    "mistral": DECODER | {"sliding_window": WINDOW},
    "gemma2": DECODER | WINDOWED | {"query_pre_attn_scalar": 8},
    "gemma3": DECODER | WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]},
    "phi": DECODER | {"num_key_value_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {name: value for name, value in DECODER.items() if name != "num_key_value_heads"},
}
ONE_ROW: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD},
    # Convolution states beside attention: no row cache, but Transformers' own cache can be cropped.
    "lfm2": DECODER | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}
ARCHITECTURES = BATCHED | ONE_ROW
MODEL_TYPES = {"gemma3": "gemma3_text"}


@torch.no_grad()
def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model in float64 (`FLOAT32`: in float32), ready to generate; the same for the same arguments."""
    config = AutoConfig.for_model(MODEL_TYPES.get(name, name), **COMMON | ARCHITECTURES[name] | changes)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # Gemma 2's soft-capping exists in the eager attention only.
    attention = {"attn_implementation": "eager"} if name == "gemma2" else {}
    torch.manual_seed(seed)
    model = auto.from_config(config, **attention).eval()
    if name not in FLOAT32:
        model.double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(STRETCH.get(name, 3.0))
        if parameter.dim() == 3:  # LFM2's convolutions: without this their state would hardly matter
            parameter.mul_(10.0)
    head = model.get_output_embeddings()
    # A new one: it may be the input embedding, too.
    head.weight = torch.nn.Parameter(head.weight * SHARPEN.get(name, 6.0))
    return model


@cache
def shared(name: str, seed: int = 0) -> PreTrainedModel:
    """`build`, once for all tests: for tests that do not change the model."""
    return build(name, seed)


@torch.no_grad()
def noisy(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose weights are off by `noise` of their own spread: the more noise, the rarer it is right."""
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn(parameter.shape) * parameter.std() * noise)  # drawn in float32 for any model
    return copied


@torch.no_grad()
def never(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose logits belong to the next token id: its argmax is never the target's."""
    copied = copy.deepcopy(model)
    head = copied.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.roll(1, dims=0))
    if head.bias is not None:
        head.bias = torch.nn.Parameter(head.bias.roll(1))
    return copied


DRAFTS = ("always", "often", "rarely", "never")


def draft_of(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A draft for `model` that is right "always" (the model itself), "often", "rarely" or "never"."""
    if kind == "always":
        return model
    if kind == "never":
        return never(model)
    frail = model.config.model_type in ("t5", "lfm2")  # stretched further, so the same noise does more
    return noisy(model, {"often": 0.05, "rarely": 0.3}[kind] * (0.1 if frail else 1.0))


def prompts(lengths: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts, padded on the left: `input_ids` and `attention_mask` of shape (rows, longest)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(4, VOCABULARY, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask}


def greedy(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """Return the text that Transformers writes alone."""
    settings = {"max_new_tokens": NEW, "do_sample": False} | settings
    out = model.generate(**inputs, **settings, output_scores=True, return_dict_in_generate=True)
    top = torch.stack(out.scores).topk(2).values  # (new, B, 2)
    new = out.sequences[:, -len(out.scores) :]
    eos = settings.get("eos_token_id", EOS)
    ends = torch.isin(new, torch.tensor([] if eos is None else eos))
    alive = (ends.long().cumsum(dim=1) - ends.long() == 0).T  # up to each row's end, with it
    gap = (top[..., 0] - top[..., 1])[alive].min()
    assert gap > 1e-5, f"the reference decides by {gap:.1e} somewhere, which rounding can turn: take another seed"
    return out.sequences


def assisted(model: Any, inputs: dict[str, torch.Tensor], draft: Any, policy: Any = "strict", **settings: Any) -> Any:
    """The same with this package; the whole output."""
    settings = {"max_new_tokens": NEW, "do_sample": False} | settings
    if draft is not None:
        settings["assistant_model"] = draft
    return hla.enable(model).generate(**inputs, **settings, lossy_policy=policy, return_dict_in_generate=True)


def some_eos(texts: torch.Tensor, width: int) -> int:
    """A token of `texts` (B, width + new) that ends their rows at times as different as can be."""
    new = texts[:, width:]

    def ends(token: int) -> set[int]:
        return {int(hits[0]) for row in new if len(hits := (row == token).nonzero())}

    return max(set(new.flatten().tolist()), key=lambda token: len(ends(token)))


# PEFT asks Transformers for a property that Transformers has renamed.
peft_warns = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def lora(model, seed):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()


def cache_of(output):
    """The cache in the output of a forward or of `generate`, or None."""
    return getattr(output, CACHE, None)
