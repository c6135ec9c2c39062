"""Tiny random models, prompts and tokenizers for the tests of `generate`."""

import copy

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.generation.streamers import BaseStreamer


VOCAB, PAD, EOS = 97, 0, 3


def llama(seed=0, layers=2, vocab=VOCAB, **config):
    """A random Llama whose weights are large enough that its text is not one token over and over."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": PAD,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return louder(LlamaForCausalLM(LlamaConfig(**(sizes | config))).double().eval())


def t5(seed=0, **config):
    """A random T5; it has no EOS, so texts are as long as asked for."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    special = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": None}
    return louder(T5ForConditionalGeneration(T5Config(**(sizes | special | config))).double().eval(), 10.0, shared=0.3)


def louder(model, factor=3.0, shared=1.0):
    """Every matrix times `factor`, embeddings that encoder and decoder share times `shared`."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(shared if "shared" in name else factor)
    return model


def near(model, noise=0.05, seed=7):
    """A draft that often agrees with `model`: the same weights and `noise` times their spread."""
    out = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in out.parameters():
            if weight.dim() > 1:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return out


def ragged(pads=(0, 3, 5), width=9, seed=0, vocab=VOCAB):
    """Random prompts of different length, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocab, (len(pads), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def one(width=9, seed=0, vocab=VOCAB):
    """One random prompt."""
    return ragged((0,), width, seed, vocab)


def words(count=VOCAB - 4):
    # Transformers' StopStringCriteria measures tokens behind the text "abcdef", so the tokenizer must know it.
    return [f"w{i}" for i in range(count - 1)] + ["abcdef"]


def of_words(inner):
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special, padding_side="left")


def tokenizer(order=None):
    """A tokenizer of whole words, ids from 4 on in `order`; 0 to 3 are special."""
    vocab = {"<pad>": PAD, "<unk>": 1, "<s>": 2, "</s>": EOS}
    vocab |= {word: 4 + i for i, word in enumerate(words() if order is None else order)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return of_words(inner)


class Listener(BaseStreamer):
    """A streamer that remembers every token it was given, and "end"."""

    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard += value.flatten().tolist()

    def end(self):
        self.heard.append("end")
