"""The layout of a call's prompts for its models: hidden tokens move to the left, and embeddings are matched with token ids."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..batch.callers_code import skip_padding
from ..batch.rows import Rows
from ..models.cached_model import POSITIONS
from ..models.distributed import is_sharded, is_spread
from ..models.introspection import base_of, device_of, tokens_known
from ..models.multimodal import EMBEDDINGS
from ..models.probe import FAILURES
from .input_checks import mask_name, refuse_mask
from .multimodal_inputs import TYPES


LIBRARIES = {
    __name__.partition(".")[0],
    "transformers",
    "torch",
    "peft",
    "contextlib",
}  # between a caller's line and this file
AT_ONCE, FEW = (
    1024,
    8,
)  # rows of an embedding table to compare at once, and leading elements to compare first


@dataclass(frozen=True)
class PromptLayout:
    """The prompts of a call.

    Args:
        ids: (B, width) int64, a placeholder for an embedding that belongs to no token.
        unseen: number of leading columns without ids in `generate`, which processors and criteria do not see.
        inputs: other inputs that `generate` prepared for the model, in this layout: hidden tokens on the left of each row.
        mask: (B, width), in the caller's layout, 0 for hidden tokens; None: none are.
        unknown: (B, width) bool, in the caller's layout, embeddings that belong to no token; None: there are none.
        moved: the columns are in another order than the caller's.
        shown: (B, width) ids in the caller's layout, if tokens are hidden between others: processors and criteria see them there.
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
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        inputs: Mapping[str, Any],
        config: GenerationConfig,
    ) -> "PromptLayout":
        """Lay out `input_ids` (B, n) and the `inputs` that `generate` prepared with them, and with its `config`."""
        name, out, ids, unknown = mask_name(model), dict(inputs), input_ids, None
        if base_of(model).config.is_encoder_decoder:
            out.pop(EMBEDDINGS, None)  # already read by the encoder
        if (embeddings := out.get(EMBEDDINGS)) is not None:
            if is_spread(model) or is_sharded(model):
                raise ValueError(
                    f"a target that is spread over ranks takes token ids alone: load it whole, or leave {EMBEDDINGS} out"
                )
            found = find_ids(model, embeddings).to(input_ids.device)
            unknown, width = found < 0, found.shape[1] - input_ids.shape[1]
            if width < 0:
                raise ValueError(
                    f"input_ids have {input_ids.shape[1]} columns, and beside {found.shape[1]} {EMBEDDINGS} they must be the ids of its last tokens"
                )
            ids = torch.cat([found.masked_fill(unknown, placeholder(config))[:, :width], input_ids], dim=1)
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
    """Warn, once for each line of the caller's code, that the mask (B, width) hides the last token of a row."""
    hidden = mask[:, -1].eq(0).tolist()
    if not any(hidden):
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    line = (
        f"{name} hides the last token of row {hidden.index(True)}: the row goes on from its last visible token, where Transformers' generate goes "
        "on from the hidden one: pad on the left (padding_side='left')"
    )
    warnings.warn(line, UserWarning, stacklevel=level)


def placeholder(config: GenerationConfig) -> int:
    """Return the token that replaces an embedding without token in a draft's prompt: BOS, or padding."""
    tokens = (getattr(config, f"_{name}_token_tensor", None) for name in ("bos", "pad"))
    return next((int(token.flatten()[0]) for token in tokens if token is not None), 0)


def find_ids(model: PreTrainedModel, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the token ids, (B, n) int64, of embeddings (B, n, d), by exact comparison; −1 for embeddings that belong to no token."""
    table, flat = base_of(model).get_input_embeddings(), embeddings.flatten(0, 1).to(device_of(model))
    out = torch.full(flat.shape[:1], -1, dtype=torch.int64, device=flat.device)
    known = tokens_known(model)
    for start in range(0, known, AT_ONCE):
        ids = torch.arange(start, min(start + AT_ONCE, known), device=flat.device)
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
