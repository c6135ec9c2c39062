"""What the models of a call are fed: their caches where Transformers keeps them, and inputs that only one kind of model has."""

import copy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..batch.rows import Rows
from ..batch.token_types import shared_types
from ..models.cached_model import GROWING, CroppingModel
from ..models.compiled.compilation import Compilation
from ..models.compiled.static_model import StaticRowModel
from ..models.distributed.sharded import RankGroup
from ..models.introspection import base_of
from ..models.masks import Columns
from ..models.multimodal import MultimodalRowModel
from ..models.probe import RECURRENT, why_not_alone
from ..models.row_model import RowModel
from .input_tensors import refuse_mask


DROP = "leave lossy_policy out"


def learned_prompt(model: Any) -> bool:
    """True for PEFT's prompt learning; its wrapper hands `generate` on to the model inside and swaps one method of it."""
    swapped = getattr(model, "__dict__", {}).get("prepare_inputs_for_generation")
    inside = getattr(swapped, "__self__", model) is not model
    return inside or getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)


def rowwise(
    model: Any, target: Any, rows: Rows, vocabulary: int | None = None, compilation: Compilation | None = None, ranks: RankGroup | None = None
) -> RowModel:  # fmt: skip
    """`model` on a cache of rows; what else the target is fed, a draft and a companion of its kind are fed too.

    `compilation`: its blocks are compiled so, where they can be. `ranks`: those that share it.
    """
    prompt = None if rows.multimodal is None else rows.multimodal.of(model, target, rows)
    if prompt is not None:
        if ranks is not None:
            raise ValueError(
                "a target that is spread over ranks takes text alone: load it whole, or leave the images out"
            )
        return MultimodalRowModel(prompt, model, len(rows.row_id_list), rows.max_length, vocabulary)
    types = rows.token_types if model is target else shared_types(model, target, rows.token_types)
    size = len(rows.row_id_list), rows.max_length
    if ranks is not None:
        out = ranks.row_model(model, *size, vocabulary, types)
    elif compilation is not None:
        out = StaticRowModel(model, *size, vocabulary, types, compilation=compilation)
    else:
        out = RowModel(model, *size, vocabulary, types)
    stand(out, rows)
    return out


def stand(model: RowModel, rows: Rows) -> None:
    """Have a model know which columns of the prompts its rows' tokens stand in, where some hide tokens."""
    if any(rows.pads):
        columns = torch.arange(rows.width, device=rows.ids.device).expand(len(rows.row_id_list), -1)
        model.stand_at(Columns(rows.visible(columns), rows.width, model.device))


def cropping(
    model: Any, rows: Rows, model_kwargs: dict[str, Any], reason: str, way_out: str = DROP, guesses: bool = False
) -> CroppingModel:
    """`reason`: why not a `RowCache`; `way_out`: what to do if what it takes instead cannot be rolled back either; `guesses`: it is a draft."""
    name = type(base_of(model)).__name__
    cannot = why_not_alone(model, model_kwargs, guesses)
    if cannot == RECURRENT:  # which a cache of rows can, where it can hold it
        cannot = f"{cannot}: {reason}"
    if cannot is not None:
        raise ValueError(f"{name} cannot be decoded in blocks ({cannot}): {way_out}")
    if len(rows.row_id_list) > 1:
        raise ValueError(
            f"{name} can only roll back one row ({reason}); this batch has {len(rows.row_id_list)}: pass prompts one by one"
        )
    if not base_of(model).config.is_encoder_decoder:
        _refuse_ungrown(model_kwargs, rows.width)
    whole = model_kwargs.get(mask_name(model)) is not None  # a draft is not told of the tokens that are hidden
    return CroppingModel(model, model_kwargs, rows.ids[:, : rows.width] if whole else rows.token_ids()[0][None])


def _refuse_ungrown(model_kwargs: dict[str, Any], width: int) -> None:
    """Refuse an input with an entry for each token of the prompt, (1, width, …), of which nobody says what new tokens have."""
    for name, value in model_kwargs.items():
        known = name in GROWING or name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL or name.startswith("encoder_")
        if not known and width > 1 and isinstance(value, torch.Tensor) and value.shape[:2] == (1, width):
            raise ValueError(
                f"lossy_policy does not know which {name} new tokens have: leave {name} or lossy_policy out"
            )


def mask_name(model: Any) -> str:
    """The argument that masks the text: an encoder-decoder's `attention_mask` masks its encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def hidden(
    input_ids: torch.Tensor, mask: torch.Tensor | None, name: str = "attention_mask"
) -> tuple[list[int], torch.Tensor | None]:
    """How many tokens of each row `mask` hides, and, where they are not all on the left, each row's columns with those first.

    The order is (B, width) int64. Raises `ValueError` or `TypeError` for a mask that is none of these rows.
    """
    if mask is None:
        return [0] * input_ids.shape[0], None
    refuse_mask(input_ids, mask, name=name)
    seen = mask.ne(0).long().to(input_ids.device)
    order = seen.argsort(dim=1, stable=True) if bool((seen.diff(dim=1) < 0).any()) else None
    return (seen == 0).sum(dim=1).tolist(), order


def refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Refuse positions, (…, B, width), other than those that a model on rows counts: 0, 1, … over the tokens that are not hidden."""
    if positions is None:
        return
    seen = torch.ones_like(input_ids) if mask is None else mask.ne(0).long().to(input_ids.device)
    counted = seen.cumsum(dim=1) - 1
    if positions.shape[-1] != input_ids.shape[1] or not bool(
        ((positions.to(input_ids.device) == counted) | (seen == 0)).all()
    ):
        raise ValueError("lossy_policy works positions out from attention_mask, got others: leave position_ids out")


def assistant_inputs(assistant: Any, rows: Rows, own: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """`own`, what a draft on Transformers' own cache is fed, with that cache."""
    own = {"use_cache": True} | own
    base_of(assistant)._prepare_cache_for_generation(
        copy.copy(config), own, None, len(rows.row_id_list), rows.max_length
    )
    return own
