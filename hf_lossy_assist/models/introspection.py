"""Facts about a Transformers model, read from its modules and config, without a cache or a forward."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


# Names of position tables in Transformers. Sinusoidal ones that grow on demand are neither `Embedding` nor tensor.
NAMES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
# The attention implementation of packed forwards, and the one that it wraps.
PACKED, ORDINARY = "hf_lossy_packed", "sdpa"
# Architectures whose ragged batches the tests compare with `generate`. Any other is probed once on a few tokens: some derive position
# biases from the attention mask and would silently go wrong.
TESTED = frozenset("llama qwen2 qwen3 mistral gemma2 gemma3_text gpt2 gpt_neox phi".split())

T = TypeVar("T")
_facts: WeakKeyDictionary[PreTrainedModel, dict[object, Any]] = WeakKeyDictionary()
# The modules that each model had when facts of it were first cached.
_modules: WeakKeyDictionary[PreTrainedModel, list[ref[torch.nn.Module]]] = WeakKeyDictionary()


def remember(base: PreTrainedModel, name: object, find: Callable[[], T]) -> T:
    """Return the result of `find`, called once for each model object and name until the model is rebuilt. The result must not refer to the model."""
    if base not in _facts:
        _facts[base], _modules[base] = {}, [ref(module) for module in base.modules()]
    facts = _facts[base]
    if name not in facts:
        facts[name] = find()
    return facts[name]


def forget_if_rebuilt(*models: PreTrainedModel | None) -> None:
    """Drop the cached facts of models whose modules have changed: an adapter was added or merged, a layer replaced."""
    for base in (base_of(model) for model in models if model is not None):
        known, modules = _modules.get(base, []), list(base.modules())
        if len(known) != len(modules) or any(at() is not module for at, module in zip(known, modules, strict=True)):
            _facts.pop(base, None)


def recall(base: PreTrainedModel, name: object, default: object = None) -> object:
    """Return the value that `remember` cached under this name, or `default`."""
    return _facts.get(base, {}).get(name, default)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Transformers model inside a wrapper of PEFT or torch.compile, or the model itself."""
    model = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
    # Looked up on the class: a failed attribute look-up on a module takes microseconds.
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def modelling_files(base: PreTrainedModel) -> list[ModuleType]:
    """Return the Python modules that define a model's parts; the `__module__` of a user's class may not exist."""
    names = {type(part).__module__ for part in base.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def learned_positions(base: PreTrainedModel) -> int | None:
    """Return the number of positions that this decoder has, or None if it has no table of them."""

    def find() -> int | None:
        decoder = base.get_decoder()
        sizes = [_size(getattr(part, name, None)) for part in decoder.modules() for name in NAMES]
        if hasattr(decoder, "build_mpt_alibi_tensor"):  # which makes that many biases
            sizes.append(base.config.max_seq_len)
        return min((size for size in sizes if size is not None), default=None)

    return remember(base, "positions", find)


def _size(table: object) -> int | None:
    if isinstance(table, torch.nn.Embedding):
        # RoBERTa's positions begin after its padding index.
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        return table.num_embeddings - max(first, getattr(table, "offset", 0))
    return table.shape[0] if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model's embeddings run: accelerate stores offloaded weights elsewhere, and in between on no device."""
    table = base_of(model).get_input_embeddings()
    hook = getattr(table, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return table.weight.device


def tokens_known(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can read."""
    return int(base_of(model).get_input_embeddings().weight.shape[0])


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that the model's logits cover; ImageGPT, for one, reads one more than it predicts."""
    base = base_of(model)
    head, size = base.get_output_embeddings(), base.config.get_text_config(decoder=True).vocab_size
    written = getattr(head, "out_features", None)
    if written is None:  # only now: an int8 head computes its `weight`, which takes seconds
        weight = getattr(head, "weight", None)
        written = len(weight) if isinstance(weight, torch.Tensor) else size
    return min(size, written)  # Inkling's head has more rows than its logits


def end_tokens(config: GenerationConfig) -> set[int]:
    """Return the end tokens of a generation config: none, one or several."""
    ends = config.eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def has_fixed_rows(model: PreTrainedModel) -> bool:
    """Return whether a PEFT call has `adapter_names`: hooks assign each row its adapter, so every forward must have all rows in order."""
    hooks = (hook for module in base_of(model).modules() for hook in module._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks)


def adapters_of(model: PreTrainedModel) -> frozenset[tuple[str, ...]]:
    """Return the PEFT adapters active in a model's forwards, with their states across layers: equal while nothing has changed."""
    layers = (module for module in base_of(model).modules() if hasattr(type(module), "adapter_layer_names"))
    states = (
        (layer.active_adapters, getattr(layer, "merged_adapters", ()), getattr(layer, "scaling", None))
        for layer in layers
        if not getattr(layer, "disable_adapters", False)
    )
    return frozenset(tuple(map(str, state)) for state in states)


def blocks_of(base: PreTrainedModel) -> torch.nn.ModuleList | None:
    """Return the decoder's blocks, counted in the module: an encoder-decoder's config gives the encoder's number of layers."""
    lists = [m for m in base.get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) > 1:
        count = base.config.get_text_config(decoder=True).num_hidden_layers
        lists = [m for m in lists if len(m) == count]
    return lists[0] if len(lists) == 1 else None


def is_tested(base: PreTrainedModel) -> bool:
    """Return whether a model is one of the `TESTED` architectures in Transformers' code; a subclass may keep another kind of state."""
    # FSDP2 inserts a class before the model's.
    kind = next(part for part in type(base).__mro__ if not part.__module__.startswith("torch.distributed."))
    return base.config.model_type in TESTED and kind.__module__.startswith("transformers.")


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention implementation that `config` names, even while packed forwards replace it."""
    return ORDINARY if config._attn_implementation == PACKED else config._attn_implementation
