"""Facts about a Transformers model, read from its modules and config, without a cache or a forward."""

import copy
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


# The attention implementation of packed forwards, and the one that it wraps.
PACKED, ORDINARY = "hf_lossy_packed", "sdpa"
# Architectures whose ragged batches the tests compare with `generate`. Any other is probed once on a few tokens: some
# derive position biases from the attention mask and would silently go wrong.
TESTED = frozenset("llama qwen2 qwen3 mistral gemma2 gemma3_text gpt2 gpt_neox phi".split())

T = TypeVar("T")


class Look(NamedTuple):
    """A model as its facts depend on it, and whether each row has an adapter now."""

    modules: list[ref[torch.nn.Module]]
    values: list[object]  # classes, replaced forwards, kinds of parameters, the config
    fixed_rows: bool

    def equals(self, other: "Look") -> bool:
        same = len(self.modules) == len(other.modules) and self.values == other.values
        return same and all(a() is b() for a, b in zip(self.modules, other.modules, strict=True))


# What each model looked like last, and its facts by name.
_facts: WeakKeyDictionary[PreTrainedModel, tuple[Look, dict[object, Any]]] = WeakKeyDictionary()
# Models, by `id`, that do not change in the context.
_looked: ContextVar[frozenset[int]] = ContextVar("looked", default=frozenset())


def remember(base: PreTrainedModel, name: object, find: Callable[[], T]) -> T:
    """Return the result of `find`, called once for each model object and name until the model changes.
    The result must not refer to the model."""
    facts = _entry(base)[1]
    if name not in facts:
        facts[name] = find()
    return facts[name]


def recall(base: PreTrainedModel, name: object, default: object = None) -> object:
    """Return the value that `remember` cached under this name, or `default`."""
    return _entry(base)[1].get(name, default)


class NotTried(str):
    """A reason that is not cached, since the model may be tried in a later call."""


def cached_per_model(find: Callable[[PreTrainedModel], T]) -> Callable[[PreTrainedModel], T]:
    """Decorate a question about a model, wrapped or not: it is asked once until the model changes."""

    @functools.wraps(find)
    def ask(model: PreTrainedModel) -> T:
        base = base_of(model)
        answers = _entry(base)[1]
        answer = answers[ask] if ask in answers else find(base)
        if not isinstance(answer, NotTried):
            answers[ask] = answer
        return answer

    return ask


def _entry(base: PreTrainedModel) -> tuple[Look, dict[object, Any]]:
    entry = _facts.get(base)
    if entry is None or id(base) not in _looked.get():
        look = _look(base)
        _facts[base] = entry = look, entry[1] if entry is not None and entry[0].equals(look) else {}
    return entry


@contextmanager
def looking_once(*models: object) -> Iterator[None]:
    """Look at these models for changes now, and rely on the cached facts of each within the context.
    What is no Transformers model is passed over."""
    bases = [base_of(model) for model in models if isinstance(model, torch.nn.Module)]
    for base in bases:
        if isinstance(base, PreTrainedModel):
            _entry(base)
    token = _looked.set(_looked.get() | {id(base) for base in bases})
    try:
        yield
    finally:
        _looked.reset(token)


def _look(base: PreTrainedModel) -> Look:
    """Look at a model once, module by module.

    An adapter that is added or merged, a layer that is replaced, another precision or attention: each changes its
    facts. Hooks and values of weights do not.
    """
    modules, values, fixed = list[ref[torch.nn.Module]](), list[object](), False
    waiting: list[torch.nn.Module] = [base]
    while waiting:
        module = waiting.pop()
        state = module.__dict__  # attributes of modules take microseconds
        modules.append(ref(module))
        kinds = [None if p is None else (type(p), p.dtype, p.device) for p in state["_parameters"].values()]
        values.append((type(module), id(state.get("forward")), state.get("rope_type"), kinds))
        if hooks := state["_forward_pre_hooks"]:
            fixed = fixed or any("adapter_names" in getattr(hook, "keywords", {}) for hook in hooks.values())
        waiting += filter(None, state["_modules"].values())
    inner = (config for config in vars(base.config).values() if isinstance(config, PreTrainedConfig))
    return Look(modules, [*values, *map(_settings, (base.config, *inner))], fixed)


def _settings(config: PreTrainedConfig) -> dict[str, object]:
    """Copy a config's entries, but for its parts; packed forwards replace the attention for a while."""
    out = {name: _value(value) for name, value in vars(config).items() if not isinstance(value, PreTrainedConfig)}
    return out | {"_attn_implementation_internal": attention_of(config)}


def _value(value: object) -> object:
    if isinstance(value, dict | list | set):
        return copy.copy(value)
    plain = value is None or isinstance(value, bool | int | float | str | tuple | torch.dtype)
    return value if plain else id(value)  # a tensor cannot be compared as a whole


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Transformers model inside a wrapper of PEFT or torch.compile, or the model itself."""
    model = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
    # Looked up on the class: a failed attribute look-up on a module takes microseconds.
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def modelling_files(base: PreTrainedModel) -> list[ModuleType]:
    """Return the Python modules that define a model's parts; the `__module__` of a user's class may not exist."""
    names = {type(module).__module__ for module in base.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def is_one_of_several() -> bool:
    """Return whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model's embeddings run: accelerate stores offloaded weights elsewhere, and in
    between on no device."""
    table = base_of(model).get_input_embeddings()
    hook = getattr(table, "_hf_hook", None)
    for inner_hook in getattr(hook, "hooks", (hook,)):
        device = getattr(inner_hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return table.weight.device


def tokens_known(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can read."""
    return int(base_of(model).get_input_embeddings().weight.shape[0])


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that the model's logits cover;
    ImageGPT, for one, reads one more than it predicts."""
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
    """Return whether a PEFT call has `adapter_names`: hooks assign each row its adapter, so every forward must have all
    rows in order."""
    return _entry(base_of(model))[0].fixed_rows


def adapters_of(model: PreTrainedModel) -> frozenset[tuple[str, ...]]:
    """Return the PEFT adapters active in a model's forwards, with their states across layers: equal while nothing has
    changed."""
    layers = (module for module in base_of(model).modules() if hasattr(type(module), "adapter_layer_names"))
    states = (
        (layer.active_adapters, getattr(layer, "merged_adapters", ()), getattr(layer, "scaling", None))
        for layer in layers
        if not getattr(layer, "disable_adapters", False)
    )
    return frozenset(tuple(map(str, state)) for state in states)


def blocks_of(base: PreTrainedModel) -> torch.nn.ModuleList | None:
    """Return the decoder's blocks, counted in the module: an encoder-decoder's config gives the encoder's number of
    layers."""
    lists = [m for m in base.get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) > 1:
        count = base.config.get_text_config(decoder=True).num_hidden_layers
        lists = [m for m in lists if len(m) == count]
    return lists[0] if len(lists) == 1 else None


def leaves_early(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Return whether `draft` consists of the target's first blocks and its embeddings."""
    first, whole = base_of(draft), base_of(target)
    few, all_ = blocks_of(first), blocks_of(whole)
    if few is None or all_ is None or first.get_input_embeddings() is not whole.get_input_embeddings():
        return False
    return len(few) < len(all_) and all(a is b for a, b in zip(few, all_, strict=False))


def is_tested(base: PreTrainedModel) -> bool:
    """Return whether a model is one of the `TESTED` architectures in Transformers' code;
    a subclass may keep another kind of state."""
    # FSDP2 inserts a class before the model's.
    kind = next(cls for cls in type(base).__mro__ if not cls.__module__.startswith("torch.distributed."))
    return base.config.model_type in TESTED and kind.__module__.startswith("transformers.")


class StandIn(str):
    """The name of an attention implementation that replaces `original` during forwards of this package."""

    original: str


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention implementation that `config` names, even while forwards of this package replace it."""
    name = config._attn_implementation
    return ORDINARY if name == PACKED else getattr(name, "original", name)


def takes_masks(attention: str) -> bool:
    """Return whether rows run under an attention implementation: as it is, or with sdpa or eager in place of
    FlashAttention and FlexAttention."""
    return attention in (ORDINARY, "eager", "flex_attention") or "flash" in attention


SUFFIX = re.compile(r"(:int8|\[:\d+\])+$")  # after a model's name: it is in int8, or has so many layers


def dtype_of(model: PreTrainedModel) -> str:
    """Return a model's compute precision as written in records: "float32", "bfloat16", "int8"."""
    in_int8 = getattr(model, "in_int8", None)  # a drafter's
    if in_int8 is None:
        in_int8 = named_int8(str(base_of(model).config.name_or_path))
    return "int8" if in_int8 else str(model.dtype).removeprefix("torch.")


def plain_name(name: str) -> str:
    """Return a model's name without the suffixes for int8 and early exit."""
    return SUFFIX.sub("", name)


def named_int8(name: str) -> bool:
    """Return whether a model's name says that it is in int8, or an early exit of such a model."""
    match = SUFFIX.search(name)
    return match is not None and ":int8" in match[0]


LOOKED = 16  # values of each tensor that `weights_version` reads
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size: NaN equals NaN in bits
TENSORS = (torch.Tensor, torch.nn.Parameter)
_versions: WeakKeyDictionary[torch.nn.Module, tuple[object, int]] = WeakKeyDictionary()
_numbers: dict[int, tuple[int, Any]] = {}  # by `id`, while the object lives; with the reference that tracks it
_count = itertools.count()


def number(thing: Any) -> int:
    """Return the number of an object. It is never reused, unlike an `id`."""
    key = id(thing)
    if key not in _numbers:
        try:
            alive = ref(thing, lambda _: _numbers.pop(key, None))
        except TypeError:  # this type has no weak references
            alive = thing
        _numbers[key] = next(_count), alive
    return _numbers[key][0]


def weights_version(model: torch.nn.Module) -> int:
    """Return a number that changes with a model's weights and modules, and never returns to an earlier one.

    Read: every module's identity; every tensor's address, dtype and count of changes in place; `LOOKED` evenly spaced
    values of each, since a change through `.data` is not counted. One that leaves those values alone is not noticed.
    Takes 5 µs of CPU time a tensor.
    """
    modules, samples = list(model.modules()), dict[tuple[torch.device, int], list[torch.Tensor]]()
    state: list[object] = [number(module) for module in modules]
    state += [number(packed) for module in modules if (packed := vars(module).get("_packed_params")) is not None]
    tables = (table for module in modules for table in (module._parameters, module._buffers))
    with torch.no_grad():
        for tensor in (tensor for table in tables for tensor in table.values() if tensor is not None):
            version = None if tensor.is_inference() else tensor._version
            whole = type(tensor) in TENSORS and tensor.layout is torch.strided and not tensor.is_quantized
            state.append((tensor.data_ptr() if whole else number(tensor), tensor.dtype, version))
            if whole and not tensor.is_meta and tensor.numel() and tensor.element_size() in INTEGERS:
                room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
                size = min(tensor.numel(), room)
                values = tensor.as_strided((min(LOOKED, size),), (max(1, size // LOOKED),))
                key = tensor.device, tensor.element_size()
                samples.setdefault(key, []).append(values.view(INTEGERS[tensor.element_size()]))
        state += [torch.cat(values).cpu().numpy().tobytes() for values in samples.values()]
    if model not in _versions or _versions[model][0] != state:
        _versions[model] = state, next(_count)
    return _versions[model][1]
