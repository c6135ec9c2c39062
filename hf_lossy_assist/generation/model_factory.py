"""Puts the models of a call on caches: one of rows if that can be, else Transformers' own; and finds what a mask hides in a prompt."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..batch.rows import Rows
from ..batch.token_types import shared_types
from ..models.cached_model import GROWING, CroppingModel
from ..models.compiled.compilation import Compilation
from ..models.compiled.static_model import StaticRowModel
from ..models.distributed import RankGroup
from ..models.introspection import base_of
from ..models.masks import Columns
from ..models.multimodal import MultimodalRowModel
from ..models.probe import RECURRENT, why_not_alone
from ..models.row_model import RowModel
from .input_checks import refuse_mask


WITHOUT_POLICY = "leave lossy_policy out"


def make_row_model(
    model: PreTrainedModel,
    target: PreTrainedModel,
    rows: Rows,
    vocabulary: int | None = None,
    compilation: Compilation | None = None,
    ranks: RankGroup | None = None,
) -> RowModel:
    """Put `model` on a cache of rows; what else the target is fed, a draft and a companion of its kind are fed too.

    `compilation`: its blocks are compiled so, if they can be. `ranks`: those that share it.
    """
    prompt = None if rows.multimodal is None else rows.multimodal.of(model, target, rows)
    if prompt is not None and ranks is not None:
        raise ValueError("a target that is spread over ranks takes text alone: load it whole, or leave the images out")
    size = len(rows.row_id_list), rows.max_length, vocabulary
    if prompt is not None:
        return MultimodalRowModel(prompt, model, *size)
    types = rows.token_types if model is target else shared_types(model, target, rows.token_types)
    if ranks is not None:
        out = ranks.row_model(model, *size, types)
    elif compilation is not None:
        out = StaticRowModel(model, *size, types, compilation=compilation)
    else:
        out = RowModel(model, *size, types)
    set_columns(out, rows)
    return out


def set_columns(model: RowModel, rows: Rows) -> None:
    """Tell a model in which columns of the prompts its rows' tokens stand, if some columns are hidden."""
    if any(rows.pads):
        columns = torch.arange(rows.width, device=rows.ids.device).expand(len(rows.row_id_list), -1)
        model.stand_at(Columns(rows.visible(columns), rows.width, model.device))


def make_cropping_model(
    model: PreTrainedModel,
    rows: Rows,
    model_kwargs: dict[str, Any],
    reason: str,
    way_out: str = WITHOUT_POLICY,
    is_draft: bool = False,
) -> CroppingModel:
    """Put `model` on Transformers' cache.

    `reason`: why not a `RowCache`; `way_out`: what to do if its cache cannot be rolled back either.
    """
    name = type(base_of(model)).__name__
    cannot = why_not_alone(model, model_kwargs, is_draft)
    if cannot is not None:
        cannot = f"{cannot}: {reason}" if cannot == RECURRENT else cannot  # a cache of rows rolls states back
        raise ValueError(f"{name} cannot be decoded in blocks ({cannot}): {way_out}")
    if len(rows.row_id_list) > 1:
        raise ValueError(
            f"{name} can only roll back one row ({reason}); this batch has {len(rows.row_id_list)}: pass prompts one by one"
        )
    if not base_of(model).config.is_encoder_decoder:
        _refuse_ungrown(model_kwargs, rows.width)
    whole = model_kwargs.get(mask_name(model)) is not None  # a draft is not told of the tokens that are hidden
    return CroppingModel(model, model_kwargs, rows.ids[:, : rows.width] if whole else rows.token_ids()[0][None])


def _refuse_ungrown(model_kwargs: Mapping[str, object], width: int) -> None:
    """Refuse an input with an entry for each token of the prompt, (1, width, …), of which nobody says what new tokens have."""
    for name, value in model_kwargs.items():
        known = name in GROWING or name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL or name.startswith("encoder_")
        if not known and width > 1 and isinstance(value, torch.Tensor) and value.shape[:2] == (1, width):
            raise ValueError(
                f"lossy_policy does not know which {name} new tokens have: leave {name} or lossy_policy out"
            )


def add_cache(
    assistant: PreTrainedModel, rows: Rows, inputs: dict[str, Any], config: GenerationConfig
) -> dict[str, Any]:
    """Return a draft's `inputs` with Transformers' cache for it."""
    inputs = {"use_cache": True} | inputs
    base_of(assistant)._prepare_cache_for_generation(
        copy.copy(config), inputs, None, len(rows.row_id_list), rows.max_length
    )
    return inputs


# -- masks ----------------------------------------------------------------------------------------------------------------


def mask_name(model: PreTrainedModel) -> str:
    """Return the argument that masks the text: an encoder-decoder's `attention_mask` masks its encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def find_hidden(
    input_ids: torch.Tensor, mask: torch.Tensor | None, name: str = "attention_mask"
) -> tuple[list[int], torch.Tensor | None]:
    """Return how many tokens of each row `mask` hides, and, if they are not all on the left, each row's columns with those first.

    The order is (B, width) int64. Raises `ValueError` or `TypeError` for a mask that does not match `input_ids`.
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
    fits = positions.shape[-1] == input_ids.shape[1]
    if not fits or not bool(((positions.to(input_ids.device) == seen.cumsum(dim=1) - 1) | (seen == 0)).all()):
        raise ValueError("lossy_policy works positions out from attention_mask, got others: leave position_ids out")
