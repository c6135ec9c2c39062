"""Multimodal inputs of a call: those that `generate` prepared for the target, and the caller's for a multimodal draft."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from ..batch.rows import Rows
from ..models.cached_model import MASK, REPEATED, ZERO, NotInRows
from ..models.early_exit import leaves_early
from ..models.facts import CACHE, CACHE_NAMES, facts_of
from ..models.introspection import base_of
from ..models.multimodal import EMBEDDINGS, MultimodalRowModel, Prompt, is_multimodal, why_not_prompt
from ..models.probe import FAILURES, keeps_states_alone, may_read_at_once, why_not_rows
from ..validation import one_line
from .input_checks import find_non_text, refuse_positions


TYPES = (*REPEATED, *ZERO)  # zeros for text
HOLES = "attention_mask hides tokens between others"


def prompt_for(model: PreTrainedModel, target: PreTrainedModel, rows: Rows) -> Prompt | None:
    """Return the prompt with more than text for one of the call's models; None for a text, or for a model of text.

    Raises: `ValueError`, one line, for a draft that does not accept the target's inputs.
    """
    prompt = rows.multimodal
    if prompt is None or model is target or leaves_early(model, target):
        return prompt
    if not takes_multimodal(model) or prompt.embeddings is not None:
        return None
    name, arguments = type(base_of(model)).__name__, prompt.arguments
    if arguments is None and not find_non_text(prompt.inputs, *TYPES):
        arguments = {"input_ids": prompt.ids, "attention_mask": prompt.mask}
    if arguments is None:
        raise ValueError(
            f"{name} drafts from the same images, which custom_generate is not handed: pass lossy_policy=… to the enabled model's generate"
        )
    try:
        return _prepare(base_of(model), rows, arguments, prompt)
    except FAILURES as error:
        raise ValueError(
            f"the draft {name} cannot be given what the target is given ({one_line(error, 200)}): pass a draft of the target's family, or one "
            "that reads text alone"
        ) from error


def attach_prompt(
    model: PreTrainedModel,
    rows: Rows,
    model_kwargs: Mapping[str, object],
    arguments: Mapping[str, object] | None,
) -> None:
    """Set the target's prompt in `rows`, if it has more than text.

    Args:
        model_kwargs: prepared by `generate`.
        arguments: as in `Prompt`.

    Raises: `ValueError`, one line, for a prompt that ends with an image token, and for embeddings that the target cannot take.
    """
    inputs, input_ids = _without_cache(model_kwargs), rows.ids[:, : rows.width]
    embedded = inputs.get(EMBEDDINGS) is not None
    if embedded and (reason := _why_not_embedded(model)) is not None:
        raise ValueError(
            f"{type(base_of(model)).__name__} cannot be decoded in blocks behind {EMBEDDINGS} ({reason}): pass input_ids=…, or leave lossy_policy out"
        )
    if not may_read_at_once(model):
        return
    types = [inputs[name] for name in TYPES if inputs.get(name) is not None]
    is_text = not find_non_text(inputs, *TYPES) and not any(bool(values.any()) for values in types)
    if is_text and why_not_rows(model) is None:
        return
    if not is_text and not embedded and rows.has_holes:
        raise NotInRows(model, f"{HOLES} in a prompt with more than text")
    if not embedded:
        _refuse_end(model, input_ids, inputs)
    prompt = Prompt(input_ids, inputs, arguments)
    # A single text row can continue on a cache of Transformers'.
    if not is_text or why_not_prompt(model, prompt, rows.max_length) is None:
        rows.multimodal = prompt


def _why_not_embedded(model: PreTrainedModel) -> str | None:
    """Return why a row cache cannot take a prompt of embeddings; None if no reason is known before a trial."""
    config = base_of(model).config.get_text_config(decoder=True)
    if facts_of(model).keeps_states and keeps_states_alone(DynamicCache(config=config)):
        return "its cache counts no tokens"
    return None if may_read_at_once(model) else why_not_rows(model)


def takes_multimodal(model: PreTrainedModel) -> bool:
    """Return whether a model is multimodal and can be probed."""
    return is_multimodal(model) and may_read_at_once(model)


def resume_from_cache(
    model: PreTrainedModel, rows: Rows, mask: torch.Tensor | None, positions: torch.Tensor | None
) -> MultimodalRowModel:
    """Return a model for a cache that may hold images, where `positions` (…, 1 or B, width) of later text may lag behind the token count.

    Raises: `ValueError`, one line, for positions with a varying lag.
    """
    out = MultimodalRowModel(None, model, len(rows.row_id_list), rows.max_length)
    if positions is not None:
        seen = torch.ones_like(rows.ids[:, : rows.width]) if mask is None else mask.ne(0).long()
        lag = positions[..., -1:] - seen.sum(dim=1, keepdim=True).to(positions.device) + 1
        refuse_positions(rows.ids[:, : rows.width], mask, positions - lag)
        out.offset = lag.expand(*lag.shape[:-2], len(rows.row_id_list), 1) if bool(lag.any()) else None
    return out


def _refuse_end(model: PreTrainedModel, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> None:
    """Raise `ValueError` for prompts that end with an image token, since a round starts by reading the last token as text."""
    config, types = base_of(model).config, inputs.get("mm_token_type_ids")
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    ids = [token for token in (getattr(config, name, None) for name in names) if isinstance(token, int)]
    last = torch.isin(input_ids[:, -1], torch.tensor(ids, dtype=input_ids.dtype, device=input_ids.device))
    if types is not None:
        last = last | types[:, -1].to(last.device).ne(0)
    if bool(last.any()):
        raise ValueError(
            f"row {int(last.nonzero()[0])} ends with a piece of an image, and a prompt must end with text: put a token behind it"
        )


def _without_cache(inputs: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in (CACHE, *CACHE_NAMES)}


def _prepare(base: PreTrainedModel, rows: Rows, arguments: Mapping[str, Any], target: Prompt) -> Prompt:
    """Return what `generate` prepares for another model from the caller's `arguments`, in the layout of the `target`'s prompt."""
    names = set(inspect.signature(base.forward).parameters) - {EMBEDDINGS, "position_ids", CACHE, *CACHE_NAMES}
    inputs = {name: value for name, value in arguments.items() if name in names and value is not None}
    inputs.setdefault("input_ids", arguments.get("inputs"))
    copies = len(rows.row_id_list) // len(inputs["input_ids"])
    if rows.moved:
        moved = {"input_ids": target.ids} | {
            name: target.inputs.get(name) for name in (MASK, *TYPES) if name in inputs
        }
        inputs |= {name: value[::copies] for name, value in moved.items() if value is not None}
    tensors = {name: value.to(base.device) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    prepared: list[Prompt] = []

    def record(model: PreTrainedModel, input_ids: torch.Tensor, *args: object, **others: object) -> torch.Tensor:
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            others.pop(name, None)
        prepared.append(Prompt(input_ids, _without_cache(others)))
        return input_ids

    settings = {"max_new_tokens": 1, "do_sample": copies > 1, "num_return_sequences": copies, "num_beams": 1}
    generate = getattr(type(base), "generate", GenerationMixin.generate)
    generate(base, **inputs | tensors, **settings, custom_generate=record)
    return prepared[0]
