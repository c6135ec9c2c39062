"""Checks of a call's inputs: unsupported names, prompts and masks raise an error before a model runs."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..models.compat import CACHE, CACHE_NAMES
from ..models.distributed import is_one_of_several
from ..models.introspection import base_of, device_of, tokens_known, vocabulary_of
from ..models.multimodal import EMBEDDINGS, is_multimodal
from ..models.probe import why_not_rows
from ..validation import check_int, shown
from .arguments import Settings, check_types, refuse_modes
from .passed_caches import refuse_cache


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
    embeddings = kwargs.get(EMBEDDINGS)
    _refuse_unknown(model, kwargs, config)
    check_types(settings)
    refuse_modes(settings)
    _refuse_values(kwargs, settings)
    begin = settings["bos_token_id"]
    if (
        ids is None
        and embeddings is None
        and decoder_only
        and (begin is None or isinstance(begin, list | tuple) or begin < 0)
    ):
        raise ValueError("there is no prompt, and the target has no BOS token to start from: pass input_ids=…")
    encoded = kwargs.get("encoder_outputs")
    alone = ids is None and embeddings is None and kwargs.get(model.main_input_name) is None
    if encoded is not None and alone and not hasattr(encoded, "last_hidden_state"):
        raise TypeError(
            f"encoder_outputs: expected what the encoder returns, a BaseModelOutput, got {type(encoded).__name__}"
        )
    _refuse_tokens(model, ids, kwargs)
    prompt = ids if embeddings is None else _embedded_prompt(model, ids, embeddings)
    refuse_cache(kwargs, decoder_only)
    if decoder_only:
        # With the caller's names, and before images are encoded in vain.
        others = find_other_inputs(kwargs, config)
        if others and why_not_rows(model) is None and not is_multimodal(model):
            refuse_extra_inputs(others)
    if isinstance(prompt, torch.Tensor) and model.main_input_name == "input_ids":
        refuse_mask(prompt, kwargs.get("attention_mask"))
    new, limit, copies = settings["max_new_tokens"], settings["max_length"], settings["num_return_sequences"] or 1
    if new is not None:
        check_int("max_new_tokens", new, 1)
    elif prompt is not None and decoder_only and limit is not None and limit <= prompt.shape[1]:
        raise ValueError(
            f"max_length={limit} leaves no room behind a prompt of {prompt.shape[1]} tokens: pass max_new_tokens=…"
        )
    if kwargs.get("streamer") is not None and prompt is not None and copies * len(prompt) > 1:
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


def _refuse_values(kwargs: Mapping[str, object], settings: Settings) -> None:
    """Raise an error for values that are invalid in combination with others, which the table of arguments cannot check."""
    if kwargs.get("custom_generate") is not None:
        raise ValueError("lossy_policy and custom_generate are both decoding loops: pass one of them")
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


def _embedded_prompt(model: PreTrainedModel, ids: torch.Tensor | None, embeddings: object) -> torch.Tensor:
    """Return a tensor (B, width) in the shape of a prompt of embeddings. Raises: `ValueError` or `TypeError` for invalid ones."""
    base = base_of(model)
    encodes, name = base.config.is_encoder_decoder, type(base).__name__
    if base.main_input_name != "input_ids" or (not encodes and not _takes_embeddings(base)):
        raise ValueError(f"{name} takes no {EMBEDDINGS}: pass {base.main_input_name}=…")
    if not isinstance(embeddings, torch.Tensor):
        raise TypeError(
            f"{EMBEDDINGS}: expected a tensor of shape (batch, length, width), got {type(embeddings).__name__}"
        )
    width, device = getattr(base.get_input_embeddings(), "embedding_dim", embeddings.shape[-1]), device_of(model)
    if (
        embeddings.dim() != 3
        or not embeddings.is_floating_point()
        or not embeddings.numel()
        or embeddings.shape[-1] != width
    ):
        raise ValueError(
            f"{EMBEDDINGS}: expected numbers of shape (batch, length, {width}), got {embeddings.dtype} of shape {tuple(embeddings.shape)}"
        )
    if device.type != "meta" and embeddings.device.type not in ("cpu", device.type):
        raise ValueError(
            f"{EMBEDDINGS} are on {embeddings.device}, the target on {device}: move them with .to({str(device)!r})"
        )
    if ids is not None and encodes:
        raise ValueError(f"input_ids and {EMBEDDINGS} are both the encoder's input: pass one of them")
    if ids is not None and (len(ids) != len(embeddings) or ids.shape[1] > embeddings.shape[1]):
        raise ValueError(
            f"input_ids have shape {tuple(ids.shape)}, and beside {EMBEDDINGS} of {tuple(embeddings.shape[:2])} they must be as many rows, each the "
            "ids of its last tokens"
        )
    return embeddings[..., 0]


def _takes_embeddings(base: PreTrainedModel) -> bool:
    calls = base.forward, base.prepare_inputs_for_generation
    return all(EMBEDDINGS in inspect.signature(call).parameters for call in calls)


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


def refuse_types(model: PreTrainedModel, types: torch.Tensor | None) -> None:
    """Raise `ValueError` for `token_type_ids` of a text that a model reads; vision models need none for text, where all are 0."""
    if types is None:
        return
    later = base_of(model).prepare_inputs_for_generation(
        torch.zeros_like(types[:1]), is_first_iteration=False, use_cache=True, token_type_ids=types[:1]
    )
    if later.get("token_type_ids") is not None or bool(types.any()):
        raise ValueError(
            f"token_type_ids: {type(base_of(model)).__name__} reads them, which this loop does not feed: leave them or lossy_policy out"
        )


def _refuse_outside(name: str, ids: torch.Tensor, owner: str, size: int) -> None:
    """Raise `ValueError` for token ids outside a vocabulary of size `size`."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: token {outside} is outside the {owner}'s vocabulary of {size}")


def refuse_mask(ids: torch.Tensor, mask: object, name: str = "attention_mask") -> None:
    """Raise an error for a mask (B, width) that does not match the prompt `ids`."""
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
    # One device sync for both, (2, B).
    whole, other = torch.stack([hidden.all(dim=1), (~hidden & (mask != 1)).any(dim=1)]).tolist()
    if any(other):
        raise ValueError(f"{name}: expected 1 for a token and 0 for one that does not count, got other numbers")
    if any(whole):
        raise ValueError(f"{name} hides all of row {whole.index(True)}: every row needs a token")


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


# -- masks ----------------------------------------------------------------------------------------------------------------


def mask_name(model: PreTrainedModel) -> str:
    """Return the name of the text's mask: in an encoder-decoder, `attention_mask` is for the encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Raise `ValueError` for positions (…, B, width) that do not count 0, 1, … over the unmasked tokens, as models on rows do."""
    if positions is None:
        return
    seen = torch.ones_like(input_ids) if mask is None else mask.ne(0).long().to(input_ids.device)
    fits = positions.shape[-1] == input_ids.shape[1]
    if not fits or not bool(((positions.to(input_ids.device) == seen.cumsum(dim=1) - 1) | (seen == 0)).all()):
        raise ValueError("lossy_policy works positions out from attention_mask, got others: leave position_ids out")
