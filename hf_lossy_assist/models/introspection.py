"""Facts about a Transformers model, read off its modules and its config: no cache, no forward."""

from typing import Any
from weakref import WeakKeyDictionary

import torch


# What Transformers calls such a table. Sinusoids that grow when they are asked for more are neither `Embedding` nor tensor.
NAMES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")


_found: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()


def learned_positions(base: Any) -> int | None:
    """How many tokens of a text this decoder has positions for, or None where there is no table."""
    if base not in _found:
        decoder = base.get_decoder()
        sizes = [_size(getattr(part, name, None)) for part in decoder.modules() for name in NAMES]
        if hasattr(decoder, "build_mpt_alibi_tensor"):  # which makes so many biases
            sizes.append(base.config.max_seq_len)
        _found[base] = min((size for size in sizes if size is not None), default=None)
    return _found[base]


def _size(table: Any) -> int | None:
    if isinstance(table, torch.nn.Embedding):
        first = (
            0 if table.padding_idx is None else table.padding_idx + 1
        )  # RoBERTa's positions begin behind its padding
        return table.num_embeddings - max(first, getattr(table, "offset", 0))
    return table.shape[0] if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def base_of(model: Any) -> Any:
    """The Transformers model inside PEFT's or torch.compile's wrapper, or the model itself."""
    model = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
    # Of the class: a module looks for an attribute that it lacks for some microseconds.
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def device_of(model: Any) -> torch.device:
    """Where a model's embeddings compute: accelerate keeps offloaded weights elsewhere, on no device at all in between."""
    table = base_of(model).get_input_embeddings()
    hook: Any = getattr(table, "_hf_hook", None)
    for its in getattr(hook, "hooks", (hook,)):
        device = getattr(its, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return table.weight.device


def tokens_known(model: Any) -> int:
    """Return how many token ids a model can read."""
    return int(base_of(model).get_input_embeddings().weight.shape[0])


def has_fixed_rows(model: Any) -> bool:
    """True within a call of PEFT's with `adapter_names`: hooks give each row its adapter, so every forward must have all rows in order."""
    hooks = (hook for module in base_of(model).modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks)


def vocabulary_of(model: Any) -> int:
    """How many token ids the model's logits are over: ImageGPT, say, reads one more than it writes."""
    base = base_of(model)
    head, size = base.get_output_embeddings(), base.config.get_text_config(decoder=True).vocab_size
    weight = getattr(head, "weight", None)
    written = getattr(head, "out_features", None) or (len(weight) if isinstance(weight, torch.Tensor) else size)
    return min(size, written)  # and Inkling's has more rows than its logits


def blocks_of(base: Any) -> torch.nn.ModuleList | None:
    """The decoder's blocks, counted in the module: of an encoder-decoder, the config names the encoder's number."""
    lists = [m for m in base.get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) > 1:
        count = base.config.get_text_config(decoder=True).num_hidden_layers
        lists = [m for m in lists if len(m) == count]
    return lists[0] if len(lists) == 1 else None


# Architectures whose ragged rows the tests compare with `generate`. Any other is tried once on a few tokens before it is
# trusted: some build position biases from the attention mask and would go wrong without a word.
TESTED = frozenset("llama qwen2 qwen3 mistral gemma2 gemma3_text gpt2 gpt_neox phi".split())


def is_tested(base: Any) -> bool:
    """True for a model of one of these architectures in Transformers' own code; a subclass may keep a state of its own."""
    # FSDP2 puts a class of its own before a model's.
    kind = next(its for its in type(base).__mro__ if not its.__module__.startswith("torch.distributed."))
    return base.config.model_type in TESTED and kind.__module__.startswith("transformers.")


def attention_of(config: Any) -> str:
    """The attention that `config` names, also while packed forwards run on its model."""
    return ORDINARY if config._attn_implementation == NAME else config._attn_implementation


NAME, ORDINARY = "hf_lossy_packed", "sdpa"
