"""The layout of a call's prompts for its models: right padding moves to the left, and embeddings are matched with token ids."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..batch.processor_kinds import skip_padding
from ..batch.rows import Rows
from ..models.cached_model import POSITIONS
from ..models.compat import CACHE
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
        given: other inputs that `generate` prepared for the model, in this layout.
        mask: (B, width), in the caller's layout, 0 for masked tokens; None: none are.
        unknown: (B, width) bool, embeddings that belong to no token; None: there are none.
        holes: tokens are masked elsewhere than on the left.
        moved: the columns are in another order than the caller's.
    """

    ids: torch.Tensor
    unseen: int
    given: dict[str, Any]
    mask: torch.Tensor | None
    unknown: torch.Tensor | None = None
    holes: bool = False
    moved: bool = False

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        given: Mapping[str, Any],
        config: GenerationConfig,
        cache_name: str | None,
    ) -> "PromptLayout":
        """Lay out `input_ids` (B, n) and the inputs that `generate` prepared with them; with a cache, no column moves.

        Args:
            config: prepared by `generate`.
            cache_name: the argument by which the caller passed a cache, or None.
        """
        fixed = cache_name is not None or getattr(given.get(CACHE), "_is_user_defined", False)
        name, out, ids, unknown = mask_name(model), dict(given), input_ids, None
        if base_of(model).config.is_encoder_decoder:
            out.pop(EMBEDDINGS, None)  # already read by the encoder
        if (embeddings := out.get(EMBEDDINGS)) is not None:
            if is_spread(model) or is_sharded(model):
                raise ValueError(
                    f"a target that is spread over ranks takes token ids alone: load it whole, or leave {EMBEDDINGS} out"
                )
            found = find_ids(model, embeddings).to(input_ids.device)
            unknown, width = found < 0, found.shape[1] - input_ids.shape[1]
            ids = torch.cat([found.masked_fill(unknown, placeholder(config))[:, :width], input_ids], dim=1)
        unseen = ids.shape[1] - input_ids.shape[1]
        mask = given.get(name)
        refuse_mask(ids, mask, name)
        holes, order = mask is not None and _has_holes(mask), None
        if mask is not None and holes:
            _warn_of_hidden_ends(mask, name)
        if mask is not None and holes and not fixed:
            order = _order(mask.to(ids.device), unseen if input_ids.shape[1] else 0)
        if order is not None:
            ids, unknown = ids.gather(1, order), None if unknown is None else unknown.gather(1, order)
            for each in (name, EMBEDDINGS, POSITIONS, *TYPES):
                if isinstance(out.get(each), torch.Tensor):
                    out[each] = _moved(out[each], order, last=each == POSITIONS)
            holes = _has_holes(out[name])
        return cls(ids, unseen, out, mask, unknown, holes, order is not None)

    def rows(self, model: PreTrainedModel, criteria: StoppingCriteriaList, max_length: int, pad: int) -> Rows:
        """Return the call's rows. `pad`: the token after a row's end."""
        mask, pads, columns = self.given.get(mask_name(model)), [0] * len(self.ids), None
        if mask is not None:
            seen = mask.ne(0).long().to(self.ids.device)
            pads = (seen == 0).sum(dim=1).tolist()
            columns = seen.argsort(dim=1, stable=True) if self.holes else None  # masked ones first
        out = Rows(self.ids, pads, criteria, max_length, columns, self.unseen, pad)
        out.mask, out.unknown, out.moved = self.mask, self.unknown, self.moved
        return out

    def processors(self, model: PreTrainedModel, given: LogitsProcessorList) -> Sequence[Any]:
        """Return the call's logits processors for this layout."""
        if not self.moved or self.mask is None:
            return given
        return skip_padding(given, self.mask, self.given[mask_name(model)])


def _has_holes(mask: torch.Tensor) -> bool:
    return bool((mask.ne(0).long().diff(dim=1) < 0).any())


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


def _order(mask: torch.Tensor, first: int) -> torch.Tensor | None:
    """Return a column order (B, width) int64 that moves each row's masked end to the front, from column `first` on; None: no change."""
    seen, width = mask.ne(0), mask.shape[1]
    if bool(seen[:, -1].all()):
        return None
    hidden = seen.flip(1).long().argmax(dim=1, keepdim=True)  # masked tokens at the end of each row
    if int(hidden.max()) >= width - first:
        first = 0
    columns = torch.arange(width, device=mask.device).expand_as(mask)
    turned = first + (columns - first - hidden) % (width - first)
    return torch.where(columns < first, columns, turned)


def _moved(value: torch.Tensor, order: torch.Tensor, last: bool) -> torch.Tensor:
    """Reorder the columns of `value` by `order` (B, width): (B, width, …), or with `last` (…, B or 1, width)."""
    order = order.to(value.device)
    if last:
        return value.expand(*value.shape[:-2], *order.shape).gather(-1, order.expand(*value.shape[:-2], *order.shape))
    return value.gather(1, order.view(*order.shape, *[1] * (value.dim() - 2)).expand_as(value))
