"""Checks of a call's inputs: unsupported names, prompts, masks and caches raise an error before a model runs."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from ..models.compat import CACHE, CACHE_NAMES, passed_as
from ..models.distributed import is_one_of_several
from ..models.introspection import base_of, device_of, tokens_known, vocabulary_of
from ..models.multimodal import is_multimodal
from ..models.probe import crops, keeps_states_alone, why_not_rows
from ..validation import check_int, shown
from .arguments import Settings, check_types, refuse_modes


GENERATE = set(inspect.signature(GenerationMixin.generate).parameters)
LABELS = "labels"  # passed by Trainer, ignored by `generate`
# Arguments of `generate` beyond its signature, the generation config and the model's forward.
OTHERS = set("tokenizer assistant_tokenizer input_ids inputs_embeds attention_mask trust_remote_code".split()) | {
    LABELS,
    *CACHE_NAMES,
}
# Inputs from `generate` that a decoder on a `RowCache` accepts.
TEXT_INPUTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "token_type_ids"}


def refuse_arguments(model: PreTrainedModel, kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Raise `ValueError` or `TypeError` for arguments that this loop does not support, before Transformers prepares anything."""
    settings, decoder_only = Settings(kwargs, config), not base_of(model).config.is_encoder_decoder
    ids = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    _refuse_unknown(model, kwargs, config)
    check_types(settings)
    refuse_modes(settings)
    _refuse_values(kwargs, settings)
    begin = settings["bos_token_id"]
    if ids is None and decoder_only and (begin is None or isinstance(begin, list | tuple) or begin < 0):
        raise ValueError("there is no prompt, and the target has no BOS token to start from: pass input_ids=…")
    _refuse_tokens(model, ids, kwargs)
    _refuse_cache(kwargs, decoder_only)
    if decoder_only:
        # With the caller's names, and before images are encoded in vain.
        others = find_other_inputs(kwargs, config)
        if others and why_not_rows(model) is None and not is_multimodal(model):
            refuse_extra_inputs(others)
    if isinstance(ids, torch.Tensor) and model.main_input_name == "input_ids":
        refuse_mask(ids, kwargs.get("attention_mask"), decoder_only)
    new, limit, copies = settings["max_new_tokens"], settings["max_length"], settings["num_return_sequences"] or 1
    if new is not None:
        check_int("max_new_tokens", new, 1)
    elif ids is not None and decoder_only and limit is not None and limit <= ids.shape[1]:
        raise ValueError(
            f"max_length={limit} leaves no room behind a prompt of {ids.shape[1]} tokens: pass max_new_tokens=…"
        )
    if kwargs.get("streamer") is not None and ids is not None and copies * len(ids) > 1:
        raise ValueError("a streamer serves one row; pass prompts one by one, or leave streamer out")


def _refuse_unknown(model: PreTrainedModel, kwargs: Mapping[str, object], config: GenerationConfig) -> None:
    known = GENERATE | set(vars(config)) | OTHERS
    # Whisper's `generate` has additional arguments.
    for call in (model.forward, model.prepare_inputs_for_generation, type(model).generate):
        known |= set(inspect.signature(call).parameters)
    known -= {"self", "kwargs", "args"}
    for name, value in kwargs.items():
        if name not in known and not name.startswith("decoder_") and value is not None:
            # `cache` is the name in newer releases of Transformers.
            close = [CACHE] if name == "cache" else difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ": leave it out"
            raise TypeError(f"generate: this model takes no argument {shown(name)}{hint}")


NOT_TAKEN = {
    "custom_generate": "lossy_policy and custom_generate are both decoding loops: pass one of them",
    "inputs_embeds": "lossy_policy needs token ids: pass input_ids=… in place of inputs_embeds=…",
    "position_ids": "lossy_policy works positions out from attention_mask, got position_ids: leave them out",
}


def _refuse_values(kwargs: Mapping[str, object], settings: Settings) -> None:
    """Raise an error for values that are invalid in combination with others, which the table of arguments cannot check."""
    for name, line in NOT_TAKEN.items():
        if kwargs.get(name) is not None:
            raise ValueError(line)
    if kwargs.get("inputs") is not None and kwargs.get("input_ids") is not None:
        raise ValueError("inputs and input_ids are two names of the prompt: pass one of them")
    if not (kwargs.get("logits_to_keep") is None or type(kwargs["logits_to_keep"]) is int):
        raise TypeError("lossy_policy decides which logits a forward computes: leave logits_to_keep out")
    if kwargs.get("synced_gpus") and not is_one_of_several():
        raise ValueError("synced_gpus=True keeps several processes in step, and this is the only one: leave it out")
    copies = settings["num_return_sequences"] or 1
    if copies > 1 and not settings["do_sample"]:
        raise ValueError(f"num_return_sequences={copies} would be {copies} equal greedy texts: pass do_sample=True")


# -- tensors --------------------------------------------------------------------------------------------------------------


def _refuse_tokens(model: PreTrainedModel, ids: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise an error for invalid token ids, and for ids that the model cannot embed."""
    if ids is not None and model.main_input_name == "input_ids":
        refuse_prompt(model, ids)
    if kwargs.get("token_type_ids") is not None:
        _refuse_ids("token_type_ids", kwargs["token_type_ids"])
    if kwargs.get("decoder_input_ids") is not None:
        _refuse_ids("decoder_input_ids", kwargs["decoder_input_ids"])
        _refuse_outside("decoder_input_ids", kwargs["decoder_input_ids"], "decoder", vocabulary_of(model))


def refuse_prompt(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise an error for `input_ids` (B, length) that the target cannot embed."""
    _refuse_ids("input_ids", ids)
    device = device_of(model)
    if device.type != "meta" and ids.device.type not in ("cpu", device.type):
        raise ValueError(f"input_ids are on {ids.device}, the target on {device}: move them with .to({str(device)!r})")
    _refuse_outside("input_ids", ids, "target", tokens_known(model))


def _refuse_ids(name: str, ids: object) -> None:
    """Raise an error for anything but a dense tensor (B, length) of integers."""
    expected = f"{name}: expected a tensor of shape (batch, length), got {type(ids).__name__}"
    if isinstance(ids, Mapping):
        raise TypeError(f"{expected}, all that a tokenizer returned: unpack it, generate(**inputs, …)")
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{expected}; pass return_tensors='pt' to the tokenizer")
    if ids.is_nested:
        raise ValueError(
            f"{name}: expected a dense tensor of shape (batch, length), got a nested one: pad it, tokenizer(…, padding=True)"
        )
    fits = ids.dim() == 2 and ids.dtype in (torch.int64, torch.int32) and ids.layout == torch.strided
    if not fits or ids.numel() == 0:
        raise ValueError(
            f"{name}: expected whole numbers of shape (batch, length), got {ids.dtype} of shape {tuple(ids.shape)}"
        )


def _refuse_outside(name: str, ids: torch.Tensor, owner: str, size: int) -> None:
    """Raise `ValueError` for token ids outside a vocabulary of size `size`."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: token {outside} is outside the {owner}'s vocabulary of {size}")


def refuse_mask(ids: torch.Tensor, mask: object, ends_in_text: bool = True, name: str = "attention_mask") -> None:
    """Raise an error for a mask (B, width) that does not match `ids`; with `ends_in_text`, also if it masks a row's last token."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor of shape (batch, length), got {type(mask).__name__}")
    if mask.is_nested:
        raise ValueError(f"{name}: expected a dense tensor of shape {tuple(ids.shape)}, got a nested one")
    if mask.device.type not in ("cpu", ids.device.type):
        raise ValueError(
            f"{name} is on {mask.device}, input_ids on {ids.device}: move it with .to({str(ids.device)!r})"
        )
    if tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    if mask.layout != torch.strided or mask.is_complex():
        raise ValueError(f"{name}: expected a dense tensor of 0 and 1, got {mask.dtype} ({mask.layout})")
    hidden = mask == 0
    # One device sync for all three, (3, B).
    last, whole, other = torch.stack([hidden[:, -1], hidden.all(dim=1), (~hidden & (mask != 1)).any(dim=1)]).tolist()
    if any(other):
        raise ValueError(f"{name}: expected 1 for a token and 0 for one that does not count, got other numbers")
    if any(whole):
        raise ValueError(f"{name} hides all of row {whole.index(True)}: every row needs a token")
    if ends_in_text and any(last):
        raise ValueError(
            f"{name} hides the last token of row {last.index(True)}: pad on the left (tokenizer.padding_side='left')"
        )


def find_other_inputs(kwargs: Mapping[str, object], config: GenerationConfig) -> dict[str, object]:
    """Return the caller's non-text inputs of a model, by name."""
    settings = GENERATE | set(vars(config)) | OTHERS | TEXT_INPUTS
    return {name: value for name, value in kwargs.items() if value is not None and name not in settings}


def refuse_extra_inputs(model_kwargs: Mapping[str, object]) -> None:
    """Raise `ValueError` for non-text inputs, such as images, of a model that runs on a `RowCache`."""
    for name, value in model_kwargs.items():
        if name == "mm_encoder_outputs" and isinstance(value, dict):
            # `generate` passes it to every multimodal model, empty for text; encoded inputs are in it by kind.
            kinds = [kind for kind, encoded in value.items() if encoded is not None]
            name, value = f"{' and '.join(kinds)} inputs", kinds or None
        if name not in TEXT_INPUTS and value is not None:
            raise ValueError(
                f"lossy_policy handles text alone, and the model was also given {name}: leave {name} or lossy_policy out"
            )


# -- caches passed by the caller ------------------------------------------------------------------------------------------


def _refuse_cache(kwargs: Mapping[str, object], decoder_only: bool) -> None:
    """Raise an error for an object that is no cache, or a cache that cannot be rolled back."""
    name = passed_as(kwargs)
    if name is None:
        return
    cache = kwargs[name]
    if not isinstance(cache, Cache):
        raise TypeError(f"{name}: expected a Cache such as DynamicCache, got {type(cache).__name__}")
    _refuse_uncroppable(cache, name)
    if decoder_only and isinstance(cache, EncoderDecoderCache):
        raise TypeError(f"{name}: an EncoderDecoderCache is for encoder-decoders; pass a DynamicCache")


def _refuse_uncroppable(cache: Cache, name: str) -> None:
    """Raise `ValueError` for a cache, passed as `name`, that cannot be rolled back."""
    layers = _find_layers(cache)
    # Quantised layers inherit `crop` from DynamicLayer, which cuts only tokens that are not quantised yet.
    kinds = [type(layer) for layer in layers if any("Quantized" in kind.__name__ for kind in type(layer).__mro__)]
    # Static layers with a sliding window, unless the whole text fits into it.
    kinds += [type(layer) for layer in layers if isinstance(layer, StaticLayer) and not layer.is_croppable]
    rolled_back, other = "cannot be rolled back, as a cache must be here", "pass a DynamicCache, or "
    if keeps_states_alone(cache):
        reason, other = f"a {type(cache).__name__} of recurrent states alone {rolled_back}", ""
    elif not crops(cache):
        reason = f"a {type(cache).__name__} {rolled_back}"
    elif kinds:
        reason = f"a cache of {kinds[0].__name__}s {rolled_back}"
    else:
        return
    raise ValueError(f"{name}: {reason}: {other}leave it out")


def _find_layers(cache: Cache) -> list[CacheLayerMixin]:
    """Return the layers with the text's keys and values."""
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or []


def check_passed_cache(model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, longest: int, name: str) -> None:
    """Raise an error for a cache with other rows or of another model, one that already holds the whole text, or one that is too small.

    `longest`: maximum length of the text in tokens. `name`: the argument's name.
    """
    _refuse_uncroppable(cache, name)
    base, layers = base_of(model), _find_layers(cache)
    if base.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
        # The model would append the states of both attentions in one cache.
        raise ValueError(
            f"{name}: {type(base).__name__} is an encoder-decoder and keeps two caches: pass "
            f"EncoderDecoderCache(DynamicCache(), DynamicCache()), got a {type(cache).__name__}"
        )
    keys = [layer.keys for layer in layers if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4]
    rows = {key.shape[0] for key in keys} - {len(input_ids)}
    if rows:
        raise ValueError(f"{name} holds {rows.pop()} rows, input_ids has {len(input_ids)}: they must agree")
    config = base.config.get_text_config(decoder=True)
    for i, (layer, expected) in enumerate(zip(layers, DynamicCache(config=config).layers, strict=False)):
        window, seen = getattr(layer, "sliding_window", None), getattr(expected, "sliding_window", None)
        if window is not None and window != seen:  # made from another model's config
            sees = "the whole text" if seen is None else f"{seen} tokens"
            raise ValueError(
                f"{name} keeps {window} tokens in layer {i}, where the target sees {sees}: pass DynamicCache(config=model.config)"
            )
    if len(keys) > config.num_hidden_layers:
        raise ValueError(
            f"{name} holds {len(keys)} layers, the target has {config.num_hidden_layers}: pass a cache of this model's"
        )
    static = [layer for layer in layers if isinstance(layer, StaticLayer)]
    other = {layer.keys.dtype for layer in static if getattr(layer, "keys", None) is not None} - {base.dtype}
    if other and not torch.is_autocast_enabled(
        base.device.type
    ):  # where Transformers' loop fails with an error about dtypes
        raise ValueError(
            f"{name} is laid out in {str(other.pop()).removeprefix('torch.')} and the target computes in {str(base.dtype).removeprefix('torch.')}: "
            "pass a cache of this model's"
        )
    room = min((layer.max_cache_len for layer in static), default=longest)
    if room < longest - 1:  # the last token is never cached
        raise ValueError(f"{name} has room for {room} tokens, and this text may come to {longest}: pass a larger one")
    held = int(cache.get_seq_length())
    if held >= input_ids.shape[1] and not base.config.is_encoder_decoder:  # counted with padding, as in `generate`
        raise ValueError(
            f"{name} holds {held} tokens, input_ids has {input_ids.shape[1]}: pass the whole text, old and new"
        )


# -- masks ----------------------------------------------------------------------------------------------------------------


def mask_name(model: PreTrainedModel) -> str:
    """Return the name of the text's mask: in an encoder-decoder, `attention_mask` is for the encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def find_hidden(
    input_ids: torch.Tensor, mask: torch.Tensor | None, name: str = "attention_mask"
) -> tuple[list[int], torch.Tensor | None]:
    """Return the number of masked tokens in each row and, unless all are on the left, each row's columns with masked ones first.

    The columns are (B, width) int64. Raises: `ValueError` or `TypeError` for a mask that does not match `input_ids`.
    """
    if mask is None:
        return [0] * input_ids.shape[0], None
    refuse_mask(input_ids, mask, name=name)
    seen = mask.ne(0).long().to(input_ids.device)
    order = seen.argsort(dim=1, stable=True) if bool((seen.diff(dim=1) < 0).any()) else None
    return (seen == 0).sum(dim=1).tolist(), order


def refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Raise `ValueError` for positions (…, B, width) that do not count 0, 1, … over the unmasked tokens, as models on rows do."""
    if positions is None:
        return
    seen = torch.ones_like(input_ids) if mask is None else mask.ne(0).long().to(input_ids.device)
    fits = positions.shape[-1] == input_ids.shape[1]
    if not fits or not bool(((positions.to(input_ids.device) == seen.cumsum(dim=1) - 1) | (seen == 0)).all()):
        raise ValueError("lossy_policy works positions out from attention_mask, got others: leave position_ids out")
