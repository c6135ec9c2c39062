"""The layout of a call's prompts for its models: hidden tokens move to the left, and embeddings are matched with token
ids."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..batch.callers_code import skip_padding
from ..batch.rows import Rows
from ..models.cached_model import MASK, POSITIONS, REPEATED, ZERO, NotInRows
from ..models.distributed import is_sharded, is_spread
from ..models.facts import CACHE, CACHE_NAMES, facts_of
from ..models.introspection import base_of, device_of, leaves_early, tokens_known
from ..models.multimodal import EMBEDDINGS, MultimodalRowModel, Prompt, is_multimodal, why_not_prompt
from ..models.probe import FAILURES, keeps_states_alone, may_read_at_once, why_not_rows
from ..validation import one_line
from .arguments import find_non_text, mask_name, refuse_mask, refuse_positions
from .model_checks import warn_once


ROWS_AT_ONCE, FEW = 1024, 8  # rows of an embedding table to compare at once, and leading elements to compare first


@dataclass(frozen=True)
class PromptLayout:
    """The prompts of a call.

    Args:
        ids: (B, width) int64, a placeholder for an embedding that belongs to no token.
        unseen: number of leading columns without ids in `generate`, which processors and criteria do not see.
        inputs: other inputs that `generate` prepared for the model, in this layout: hidden tokens on the left of each
            row.
        mask: (B, width), in the caller's layout, 0 for hidden tokens; None: none are.
        unknown: (B, width) bool, in the caller's layout, embeddings that belong to no token; None: there are none.
        moved: the columns are in another order than the caller's.
        shown: (B, width) ids in the caller's layout, if tokens are hidden between others: processors and criteria see
            them there.
    """

    ids: torch.Tensor
    unseen: int
    inputs: dict[str, Any]
    mask: torch.Tensor | None
    unknown: torch.Tensor | None = None
    moved: bool = False
    shown: torch.Tensor | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, input_ids: torch.Tensor, inputs: Mapping[str, Any], config: GenerationConfig
    ) -> "PromptLayout":
        """Lay out `input_ids` (B, n) and the `inputs` that `generate` prepared with them, and with its `config`."""
        name, out, ids, unknown = mask_name(model), dict(inputs), input_ids, None
        if base_of(model).config.is_encoder_decoder:
            out.pop(EMBEDDINGS, None)  # already read by the encoder
        if (embeddings := out.get(EMBEDDINGS)) is not None:
            if is_spread(model) or is_sharded(model):
                raise ValueError(f"a target that is spread over ranks takes token ids alone: leave {EMBEDDINGS} out")
            read_ids = find_ids(model, embeddings).to(input_ids.device)
            unknown, width = read_ids < 0, read_ids.shape[1] - input_ids.shape[1]
            if width < 0:
                columns = f"{input_ids.shape[1]} columns, {EMBEDDINGS} {read_ids.shape[1]}"
                raise ValueError(f"input_ids have {columns}: they must be the ids of its last tokens")
            ids = torch.cat([read_ids.masked_fill(unknown, placeholder(config))[:, :width], input_ids], dim=1)
        unseen = ids.shape[1] - input_ids.shape[1]
        mask, shown = inputs.get(name), None
        refuse_mask(ids, mask, name)
        moved = mask is not None and bool((mask.ne(0).long().diff(dim=1) < 0).any())
        if mask is not None and moved:
            _warn_of_hidden_ends(mask, name)
            seen = mask.ne(0).long().to(ids.device)
            count, order = seen.cumsum(dim=1), seen.argsort(dim=1, stable=True)  # hidden tokens first
            if bool(((seen == 0) & (count > 0) & (count < count[:, -1:])).any()):  # between others
                shown = ids
            ids = ids.gather(1, order)
            for key in (name, EMBEDDINGS, POSITIONS, *TYPES):
                if isinstance(out.get(key), torch.Tensor):
                    out[key] = _moved(out[key], order, last=key == POSITIONS)
        return cls(ids, unseen, out, mask, unknown, moved, shown)

    def rows(self, criteria: StoppingCriteriaList, max_length: int, pad: int) -> Rows:
        """Return the call's rows. `pad`: the token after a row's end."""
        pads = [0] * len(self.ids) if self.mask is None else self.mask.eq(0).sum(dim=1).tolist()
        out = Rows(self.ids, pads, criteria, max_length, self.shown, self.unseen, pad)
        out.mask, out.unknown, out.moved = self.mask, self.unknown, self.moved
        return out

    def processors(self, model: PreTrainedModel, processors: LogitsProcessorList) -> Sequence[Any]:
        """Return the call's logits processors for this layout."""
        if not self.moved or self.mask is None or self.shown is not None:
            return processors
        return skip_padding(processors, self.mask, self.inputs[mask_name(model)])


def _warn_of_hidden_ends(mask: torch.Tensor, name: str) -> None:
    """Warn, once, that the mask (B, width) hides the last token of a row."""
    if 0 in (last := mask[:, -1].tolist()):
        line = (
            f"{name} hides the last token of row {last.index(0)}: the row goes on from its last visible token, where"
        )
        way_out = "pad on the left (padding_side='left')"
        warn_once(("hidden", name), f"{line} Transformers' generate goes on from the hidden one: {way_out}", 6)


def placeholder(config: GenerationConfig) -> int:
    """Return the token that replaces an embedding without token in a draft's prompt: BOS, or padding."""
    tokens = (getattr(config, f"_{name}_token_tensor", None) for name in ("bos", "pad"))
    return next((int(token.flatten()[0]) for token in tokens if token is not None), 0)


def find_ids(model: PreTrainedModel, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the token ids, (B, n) int64, of embeddings (B, n, d), by exact comparison;
    −1 for embeddings that belong to no token."""
    table, flat = base_of(model).get_input_embeddings(), embeddings.flatten(0, 1).to(device_of(model))
    out = torch.full(flat.shape[:1], -1, dtype=torch.int64, device=flat.device)
    vocabulary = tokens_known(model)
    for start in range(0, vocabulary, ROWS_AT_ONCE):
        ids = torch.arange(start, min(start + ROWS_AT_ONCE, vocabulary), device=flat.device)
        try:
            rows = table(ids)
        except FAILURES:  # a table with another interface
            break
        if rows.shape[1:] != flat.shape[1:]:
            break
        alike = (rows[:, None, :FEW] == flat[:, :FEW]).all(dim=-1)  # (rows, B · n)
        first = alike.long().argmax(dim=0)
        same = alike.any(dim=0) & (rows[first] == flat).all(dim=-1)
        out = torch.where(same, ids[first], out)
    return out.view(embeddings.shape[:2])


def _moved(value: torch.Tensor, order: torch.Tensor, last: bool) -> torch.Tensor:
    """Reorder the columns of `value` by `order` (B, width): (B, width, …), or with `last` (…, B or 1, width)."""
    order = order.to(value.device)
    if last:
        return value.expand(*value.shape[:-2], *order.shape).gather(-1, order.expand(*value.shape[:-2], *order.shape))
    return value.gather(1, order.view(*order.shape, *[1] * (value.dim() - 2)).expand_as(value))


# -- more than text ---------------------------------------------------------------------------------------------------


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
        way_out = "pass lossy_policy=… to the enabled model's generate"
        raise ValueError(f"{name} drafts from the same images, which custom_generate is not handed: {way_out}")
    try:
        return _prepare(base_of(model), rows, arguments, prompt)
    except FAILURES as error:
        line = f"the draft {name} cannot be given what the target is given ({one_line(error, 200)})"
        raise ValueError(f"{line}: pass a draft of the target's family, or one of text alone") from error


def attach_prompt(
    model: PreTrainedModel, rows: Rows, model_kwargs: Mapping[str, object], arguments: Mapping[str, object] | None
) -> None:
    """Set the target's prompt in `rows`, if it has more than text.

    Args:
        model_kwargs: prepared by `generate`.
        arguments: as in `Prompt`.

    Raises: `ValueError`, one line, for a prompt that ends with an image token, and for embeddings that the target
    cannot take.
    """
    inputs, input_ids = _without_cache(model_kwargs), rows.ids[:, : rows.width]
    embedded = inputs.get(EMBEDDINGS) is not None
    if embedded and (reason := _why_not_embedded(model)) is not None:
        name = type(base_of(model)).__name__
        raise ValueError(f"{name} cannot be decoded in blocks after {EMBEDDINGS} ({reason}): pass input_ids=…")
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
    """Return a model for a cache that may hold images, where `positions` (…, 1 or B, width) of later text may lag
    behind the token count.

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
    """Raise `ValueError` for prompts that end with an image token, since a round starts by reading the last token as
    text."""
    config, types = base_of(model).config, inputs.get("mm_token_type_ids")
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    ids = [token for token in (getattr(config, name, None) for name in names) if isinstance(token, int)]
    last = torch.isin(input_ids[:, -1], torch.tensor(ids, dtype=input_ids.dtype, device=input_ids.device))
    if types is not None:
        last = last | types[:, -1].to(last.device).ne(0)
    if bool(last.any()):
        line = f"row {int(last.nonzero()[0])} ends with a piece of an image"
        raise ValueError(f"{line}, and a prompt must end with text: put a token behind it")


def _without_cache(inputs: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in (CACHE, *CACHE_NAMES)}


def _prepare(base: PreTrainedModel, rows: Rows, arguments: Mapping[str, Any], target: Prompt) -> Prompt:
    """Return what `generate` prepares for another model from the caller's `arguments`, in the layout of the `target`'s
    prompt."""
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
