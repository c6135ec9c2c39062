"""Tiny random models and valid calls of generate; each wrong use in this folder changes one thing about them."""

import copy
from functools import cache
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


VOCAB = 97


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(vocab: int = VOCAB, **config: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **SIZES | config)).eval()


@cache
def target() -> Any:
    return hla.enable(llama())


@cache
def draft() -> Any:
    return llama()


@cache
def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return hla.enable(T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)).eval())


def ids(rows: int = 1, width: int = 6) -> torch.Tensor:
    return torch.arange(4, 4 + rows * width).view(rows, width)


def mask(*rows: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(len(rows)), "attention_mask": torch.tensor(rows)}


def generate(model: Any = None, **settings: Any) -> Any:
    """Make a call that is valid if `settings` is empty."""
    given = {"input_ids": ids(), "assistant_model": draft(), "lossy_policy": "strict", "max_new_tokens": 8}
    given |= {"do_sample": False} | settings
    return (target() if model is None else model).generate(**{k: v for k, v in given.items() if v is not ...})


def broken(model: Any) -> Any:
    """Return a copy that gives NaN as soon as a sequence contains token 10, as damaged weights would."""
    model = hla.disable(copy.deepcopy(model))
    with torch.no_grad():
        model.get_input_embeddings().weight[10] = float("nan")
    return model


@cache
def gpt2(positions: int) -> Any:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return hla.enable(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=positions, **sizes)).eval())


class Printer(BaseStreamer):
    def put(self, value: Any) -> None:
        print(value)

    def end(self) -> None:
        print()


def by_runner(**settings: Any) -> Any:
    """Make the same call without `enable`."""
    return generate(
        draft(), assistant_model=..., lossy_policy=..., custom_generate=hla.Runner("svip", draft()), **settings
    )


def filled(cache: Any) -> Any:
    """Return `cache` filled with the prompt's first tokens."""
    draft()(ids()[:, :3], **{CACHE: cache})
    return cache
