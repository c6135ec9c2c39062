"""Tiny random models in float64, in which block and token forwards always agree about the best token, and checks of the output."""

import copy
import random as random_module
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_lossy_assist as hla

from .values import shown
from .verdicts import Wrong


VOCAB, PAD, EOS, HIDDEN, PLACES = 97, 0, 3, 16, 64
COMMON = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS}
FAMILIES = ("llama", "gpt2", "t5")
END = 30  # tokens of a text, at most, whatever the arguments say

# What only this package reads, or reads otherwise: not handed to Transformers alone.
OURS = {
    "lossy_policy", "assistant_model", "assistant_tokenizer", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "assistant_early_exit", "max_matching_ngram_size",
}  # fmt: skip


@cache
def pair(family: str = "llama") -> tuple[Any, Any]:
    """Return an enabled target, and a draft that often agrees with it."""
    torch.manual_seed(0)
    sizes: dict[str, Any]
    if family == "llama":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "max_position_embeddings": PLACES}  # fmt: skip
        model: Any = LlamaForCausalLM(LlamaConfig(**COMMON | sizes))
    elif family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**COMMON, n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=PLACES))
    else:
        sizes = {
            "d_model": HIDDEN,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": PAD,
        }
        model = T5ForConditionalGeneration(T5Config(**COMMON | sizes))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0 if family == "gpt2" else 4.0)
    model.config.name_or_path = f"fuzz-{family}"
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * parameter.std(correction=0) * torch.randn_like(parameter))
    return hla.enable(model), draft


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, ids from 4 on; it knows the "abcdef" by which Transformers measures stop strings."""
    words = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{i}" for i in range(VOCAB - 5)), "abcdef"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", padding_side="left"
    )


def prompts(random: random_module.Random, rows: int) -> dict[str, torch.Tensor]:
    """Return prompts of different length, left-padded."""
    width = random.randint(2, 9)
    ids = torch.tensor([[random.randrange(4, VOCAB) for _ in range(width)] for _ in range(rows)])
    pads = [random.randrange(width) if rows > 1 and random.random() < 0.5 else 0 for _ in range(rows)]
    mask = (torch.arange(width) >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


class Short(StoppingCriteria):
    """End every sequence at `END` tokens, so that a huge limit is no endless call."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= END, device=input_ids.device)


def short() -> StoppingCriteriaList:
    return StoppingCriteriaList([Short()])


def checked(family: str, build: Callable[[], dict[str, Any]], model: Any = None, draft: Any = None) -> None:
    """Call `generate` of this package with the arguments of `build`, and compare with Transformers alone.

    Greedy output, scores and logits must be equal if the policy is lossless. Otherwise the output must be the prompt, then tokens of
    the vocabulary. Neither model may be changed by the call. Raise what the call raises, and `Wrong`.
    """
    target, other = pair(family)
    target, draft = model or target, draft or other
    before = _state(target), _state(draft)
    given = build()
    kwargs = {"assistant_model": draft, "lossy_policy": "strict"} | given
    try:
        got = target.generate(**kwargs)
    finally:
        if (_state(target), _state(draft)) != before:
            raise Wrong("the call changed a model")
    policy = kwargs["lossy_policy"]
    lossless = policy is None or hla.as_policy(policy).lossless
    _compare(target, given, build(), got, lossless)


def _compare(target: Any, given: dict[str, Any], again: dict[str, Any], got: Any, lossless: bool) -> None:
    """Compare with Transformers alone, called with the same arguments, `again`."""
    text = got if isinstance(got, torch.Tensor) else getattr(got, "sequences", None)
    if not isinstance(text, torch.Tensor) or text.dim() != 2 or text.dtype not in (torch.int64, torch.int32):
        raise Wrong(f"generate gave a {type(got).__name__}")
    if ((text < 0) | (text >= VOCAB)).any():
        raise Wrong("the text holds tokens that are none")
    try:
        torch.manual_seed(0)
        stock = type(target).generate(target, **{name: value for name, value in again.items() if name not in OURS})
    except Exception as error:
        raise Wrong(f"accepted; alone, generate raises {type(error).__name__}: {error}"[:300]) from None
    want = stock if isinstance(stock, torch.Tensor) else stock.sequences
    if isinstance(got, torch.Tensor) != isinstance(stock, torch.Tensor):
        raise Wrong(f"a {type(got).__name__} where generate alone gives a {type(stock).__name__}")
    settings = given.get("generation_config")
    sampled = given.get("do_sample", getattr(settings, "do_sample", None) or target.generation_config.do_sample)
    if not lossless or sampled:
        if text.shape[0] != want.shape[0]:
            raise Wrong(f"{text.shape[0]} rows where generate alone gives {want.shape[0]}")
        return
    if not torch.equal(text, want):
        raise Wrong(f"another text than generate alone: {text.tolist()}, not {want.tolist()}"[:600])
    for name in ("scores", "logits"):
        value, expected = getattr(got, name, None), getattr(stock, name, None)
        if (value is None) != (expected is None):
            raise Wrong(f"{name} is {'missing' if value is None else 'given unasked'}")
        if value is not None and not _alike(value, expected):
            raise Wrong(f"other {name} than generate alone")


def _alike(value: Any, expected: Any) -> bool:
    return len(value) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-5, rtol=1e-5, equal_nan=True)
        for a, b in zip(value, expected, strict=True)
    )


def _state(model: Any) -> tuple[Any, ...]:
    settings = {name: shown(value) for name, value in vars(model.generation_config).items()}
    return model.config.to_dict(), settings, model.training, sorted(model.__dict__), torch.is_inference_mode_enabled()
