"""Facts about a Transformers model, read off its modules and its config: no cache, no forward."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


# What Transformers calls a table of positions. Sinusoids that grow when they are asked for more are neither `Embedding` nor tensor.
NAMES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
# The attention that packed forwards run under, and the one that it packs.
PACKED, ORDINARY = "hf_lossy_packed", "sdpa"
# Architectures whose ragged rows the tests compare with `generate`. Any other is tried once on a few tokens before it is
# trusted: some build position biases from the attention mask and would go wrong without a word.
TESTED = frozenset("llama qwen2 qwen3 mistral gemma2 gemma3_text gpt2 gpt_neox phi".split())

T = TypeVar("T")
_facts: WeakKeyDictionary[PreTrainedModel, dict[object, Any]] = WeakKeyDictionary()
# Of a model of which something is remembered: its modules then.
_modules: WeakKeyDictionary[PreTrainedModel, list[ref[torch.nn.Module]]] = WeakKeyDictionary()


def remember(base: PreTrainedModel, name: object, find: Callable[[], T]) -> T:
    """Return what `find` returns, called once for each model object and name, until it is rebuilt. It must not hold the model itself."""
    if base not in _facts:
        _facts[base], _modules[base] = {}, [ref(module) for module in base.modules()]
    facts = _facts[base]
    if name not in facts:
        facts[name] = find()
    return facts[name]


def forget_if_rebuilt(*models: PreTrainedModel | None) -> None:
    """Forget what is remembered of models that have other modules now: an adapter was put in or merged, a layer replaced."""
    for base in (base_of(model) for model in models if model is not None):
        known, modules = _modules.get(base, []), list(base.modules())
        if len(known) != len(modules) or any(at() is not module for at, module in zip(known, modules, strict=True)):
            _facts.pop(base, None)


def recall(base: PreTrainedModel, name: object, default: object = None) -> object:
    """Return what `remember` knows by this name, or `default`."""
    return _facts.get(base, {}).get(name, default)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Transformers model inside PEFT's or torch.compile's wrapper, or the model itself."""
    model = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
    # Of the class: a module looks for an attribute that it lacks for some microseconds.
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def modelling_files(base: PreTrainedModel) -> list[ModuleType]:
    """Return the Python modules that a model's parts are from; a class of the caller's may name one that does not exist."""
    names = {type(part).__module__ for part in base.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def learned_positions(base: PreTrainedModel) -> int | None:
    """Return how many tokens of a text this decoder has positions for, or None if it has no table."""

    def find() -> int | None:
        decoder = base.get_decoder()
        sizes = [_size(getattr(part, name, None)) for part in decoder.modules() for name in NAMES]
        if hasattr(decoder, "build_mpt_alibi_tensor"):  # which makes so many biases
            sizes.append(base.config.max_seq_len)
        return min((size for size in sizes if size is not None), default=None)

    return remember(base, "positions", find)


def _size(table: object) -> int | None:
    if isinstance(table, torch.nn.Embedding):
        # RoBERTa's positions begin after its padding.
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        return table.num_embeddings - max(first, getattr(table, "offset", 0))
    return table.shape[0] if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def device_of(model: PreTrainedModel) -> torch.device:
    """Return where a model's embeddings compute: accelerate keeps offloaded weights elsewhere, on no device at all in between."""
    table = base_of(model).get_input_embeddings()
    hook = getattr(table, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return table.weight.device


def tokens_known(model: PreTrainedModel) -> int:
    """Return how many token ids a model can read."""
    return int(base_of(model).get_input_embeddings().weight.shape[0])


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many token ids the model's logits are over: ImageGPT, say, reads one more than it writes."""
    base = base_of(model)
    head, size = base.get_output_embeddings(), base.config.get_text_config(decoder=True).vocab_size
    weight = getattr(head, "weight", None)
    written = getattr(head, "out_features", None) or (len(weight) if isinstance(weight, torch.Tensor) else size)
    return min(size, written)  # and Inkling's has more rows than its logits


def end_tokens(config: GenerationConfig) -> set[int]:
    """Return the end tokens that a generation config names: none, one or several."""
    ends = config.eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def has_fixed_rows(model: PreTrainedModel) -> bool:
    """Tell whether a call of PEFT's has `adapter_names`: hooks give each row its adapter, so every forward must have all rows in order."""
    hooks = (hook for module in base_of(model).modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks)


def adapters_of(model: PreTrainedModel) -> frozenset[tuple[str, bool, str]]:
    """Return which adapters of PEFT's take part in a model's forwards, as far as they differ between its layers: equal if nothing changed."""
    layers = (module for module in base_of(model).modules() if hasattr(type(module), "adapter_layer_names"))
    states = (
        (layer.active_adapters, getattr(layer, "disable_adapters", False), getattr(layer, "merged_adapters", ()))
        for layer in layers
    )
    return frozenset((str(active), bool(off), str(merged)) for active, off, merged in states)


def blocks_of(base: PreTrainedModel) -> torch.nn.ModuleList | None:
    """Return the decoder's blocks, counted in the module: of an encoder-decoder, the config names the encoder's number."""
    lists = [m for m in base.get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) > 1:
        count = base.config.get_text_config(decoder=True).num_hidden_layers
        lists = [m for m in lists if len(m) == count]
    return lists[0] if len(lists) == 1 else None


def is_tested(base: PreTrainedModel) -> bool:
    """Tell whether a model is of one of the `TESTED` architectures in Transformers' code; a subclass may keep a state of another kind."""
    # FSDP2 puts a class before a model's.
    kind = next(part for part in type(base).__mro__ if not part.__module__.startswith("torch.distributed."))
    return base.config.model_type in TESTED and kind.__module__.startswith("transformers.")


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention that `config` names, also while packed forwards run on its model."""
    return ORDINARY if config._attn_implementation == PACKED else config._attn_implementation
