"""What a target, its draft and the helpers beside them must be: each thing that cannot work refused in one line, what nobody means to warned of."""

import functools
import inspect
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from transformers import GenerationMixin, PreTrainedModel

from ..models.compat import CACHE
from ..models.encoder_decoder import reads_encoder
from ..models.introspection import base_of, device_of, vocabulary_of
from ..validation import shown
from .inputs import learned_prompt


_unchecked: dict[
    int, set[object]
] = {}  # calls under way that need a module without checkpointing, by the module's `id`
_lock = threading.Lock()
_drafts_for_itself: WeakSet[Any] = WeakSet()  # models that were warned of
_trains: WeakSet[Any] = WeakSet()


def refuse_target(call: str, target: Any) -> None:
    """Refuse what is not a loaded model. `call`: the function that it was given to. Raises `TypeError`."""
    if not isinstance(base_of(target), PreTrainedModel):
        raise TypeError(f"{call}: target: expected a model of Transformers, got {shown(target)}")


def refuse_models(target: Any, assistant: Any) -> None:
    """Refuse models without weights or with a learned prompt, drafts that do not read text, and two models of two kinds.

    Raises: `TypeError` or `ValueError`.
    """
    for name, model in (("target", target), ("assistant", assistant)):
        if learned_prompt(model):
            raise ValueError(
                f"the {name} has a learned prompt (PEFT), which this loop cannot feed: use an adapter such as LoRA, or drop lossy_policy"
            )
    if assistant is not None:
        _refuse_assistant(assistant)
        ours, theirs = (base_of(model).config.is_encoder_decoder for model in (target, assistant))
        if ours != theirs and not (ours and reads_encoder(assistant)):
            kinds = {True: "an encoder-decoder", False: "a decoder-only model"}
            raise ValueError(f"the target is {kinds[ours]}, the assistant {kinds[theirs]}: they must be of one kind")
    for name, model in (("target", target), ("assistant", assistant)):
        if model is None:
            continue
        if device_of(model).type == "meta":  # and not offloaded
            raise ValueError(f"the {name} is on the meta device, without weights: load it with from_pretrained(…)")
        missing = any(weight.is_meta for weight in base_of(model).parameters())
        for part, module in base_of(model).named_modules() if missing else ():
            weights = [weight for weight in module.parameters(recurse=False) if weight.is_meta]
            if weights and not hasattr(module, "_hf_hook"):  # by which accelerate brings offloaded weights
                raise ValueError(
                    f"the {name} has no weights in {part or 'its first module'} (meta device): load it with from_pretrained(…)"
                )


def warn_of_models(target: Any, assistant: Any) -> None:
    """Say once for each model that it drafts for itself, and that its dropout is on. `assistant`: the draft model or None."""
    target = base_of(target)
    draft = None if assistant is None else base_of(assistant)
    if draft is target and target not in _drafts_for_itself:
        _drafts_for_itself.add(target)
        warnings.warn(
            "the target is its own draft, so each drafted token costs what a token of the target costs and nothing is gained: pass a smaller "
            "model, or hf_lossy_assist.early_exit(target, layers)",
            stacklevel=2,
        )
    for name, model in (("target", target), ("assistant", draft)):
        if model is not None and model.training and model not in _trains:
            _trains.add(model)
            warnings.warn(
                f"the {name} is in training mode, where dropout, if it has any, changes its logits from forward to forward: call eval() on it first",
                stacklevel=2,
            )


def refuse_vocabularies(target: Any, assistant: Any) -> None:
    """Refuse a draft whose token ids are not the target's. Raises `ValueError`."""
    sizes = [vocabulary_of(model) for model in (target, assistant)]
    # One tokenizer is padded to a multiple of 64 or so by different makers (Qwen2.5: 151 936 and 152 064).
    if abs(sizes[0] - sizes[1]) > 0.02 * max(sizes):
        raise ValueError(
            f"the target has {sizes[0]} token ids, the assistant {sizes[1]}: more than padding. "
            "Pass tokenizer=… and assistant_tokenizer=…, or choose an assistant with the target's tokenizer"
        )


def _refuse_assistant(assistant: Any) -> None:
    base = base_of(assistant)
    kind: Any = type(base)
    if isinstance(base, PreTrainedModel) and not base.config.is_encoder_decoder and _reads_states(kind):
        raise ValueError(
            f"{kind.__name__} drafts from the target's hidden states or keys, which only Transformers' own assisted generation "
            "hands over: drop lossy_policy, or take a draft model that reads text alone"
        )
    if not isinstance(base, PreTrainedModel) or not isinstance(base, GenerationMixin):
        hint = (
            f": load it first, AutoModelForCausalLM.from_pretrained({shown(assistant)})"
            if isinstance(assistant, str)
            else ""
        )
        raise TypeError(
            f"assistant_model: expected a loaded Transformers model with generate(), got {type(assistant).__name__}{hint}"
        )


@functools.cache
def _reads_states(model: Any) -> bool:
    """True for drafts such as DFlash's and Gemma 4's, whose forward takes states of the target in place of a text."""
    names = inspect.signature(model.forward).parameters
    return "input_ids" not in names or ("shared_kv_states" in names and CACHE not in names)


def refuse_helpers(streamer: Any, **tokenizers: Any) -> None:
    """Refuse streamers that cannot be streamed to and tokenizers that are none. Raises `TypeError`."""
    if streamer is not None and not (callable(getattr(streamer, "put", None)) and hasattr(streamer, "end")):
        raise TypeError(
            f"streamer: expected an object with put() and end(), such as TextStreamer, got {shown(streamer)}"
        )
    for name, tokenizer in tokenizers.items():
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise TypeError(
                f"{name}: expected a tokenizer, such as AutoTokenizer.from_pretrained(…), got {type(tokenizer).__name__} "
                f"{str(tokenizer)[:40]!r}"
            )


@contextmanager
def without_checkpointing(*models: Any) -> Iterator[None]:
    """Within this context, models in training keep their cache, which gradient checkpointing would drop; no gradient is taken here.

    The modules belong to all threads: the last call that needs one without checkpointing switches it on again.
    """
    call, switched = object(), []
    try:  # around all that is to be undone: a stop from the keyboard may come between any two lines
        with _lock:
            for module in _parts_in_training(models):
                if getattr(module, "gradient_checkpointing", False) or id(module) in _unchecked:
                    switched.append(module)
                    _unchecked.setdefault(id(module), set()).add(call)
                    module.gradient_checkpointing = False
        yield
    finally:
        with _lock:
            for module in switched:
                calls = _unchecked.get(id(module), set())
                calls.discard(call)
                if not calls:
                    _unchecked.pop(id(module), None)
                    module.gradient_checkpointing = True


def _parts_in_training(models: tuple[Any, ...]) -> Iterator[Any]:
    for model in models:
        if model is not None and model.training:
            yield from model.modules()
