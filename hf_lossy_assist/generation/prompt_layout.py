"""The prompts of a call as its models read them: padding on the right is moved to the left, and embeddings stand beside the ids that they come from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from ..batch.rows import Rows
from ..models.cached_model import POSITIONS
from ..models.compat import CACHE
from ..models.distributed import is_sharded, is_spread
from ..models.introspection import base_of, device_of, tokens_known
from ..models.multimodal import EMBEDDINGS
from ..models.probe import FAILURES
from .arguments import Settings
from .input_checks import mask_name, refuse_mask, refuse_prompt
from .multimodal_inputs import TYPES


AT_ONCE, FEW = (
    1024,
    8,
)  # rows of a table that are compared with the embeddings at once, and of their numbers the first ones


@dataclass(frozen=True)
class PromptLayout:
    """The prompts of a call.

    Args:
        ids: (B, width) int64, a placeholder where an embedding is no token's.
        unseen: how many of the first columns `generate` has no ids of, so that processors and criteria do not see them.
        given: what `generate` prepared for the model beside the ids, in this layout.
        mask: (B, width), in the caller's layout, 0 where a token is hidden; None: nowhere.
        unknown: (B, width) bool, the embeddings of no token; None: there are none.
        holes: hidden tokens stand elsewhere than on the left. moved: columns stand elsewhere than in the caller's layout.
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
        """Lay out `input_ids` (B, n) and what `generate` prepared with them; in a call with a cache all columns stay where they are.

        Args:
            config: the prepared one. cache_name: by which the caller passed a cache, or None.
        """
        fixed = cache_name is not None or getattr(given.get(CACHE), "_is_user_defined", False)
        name, out, ids, unknown = mask_name(model), dict(given), input_ids, None
        if base_of(model).config.is_encoder_decoder:
            out.pop(EMBEDDINGS, None)  # which its encoder has read
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
        if mask is not None and holes and not fixed:
            order = _order(mask.to(ids.device), unseen if input_ids.shape[1] else 0)
        if order is not None:
            ids, unknown = ids.gather(1, order), None if unknown is None else unknown.gather(1, order)
            for each in (name, EMBEDDINGS, POSITIONS, *TYPES):
                if isinstance(out.get(each), torch.Tensor):
                    out[each] = _moved(out[each], order, last=each == POSITIONS)
            holes = _has_holes(out[name])
        return cls(ids, unseen, out, mask, unknown, holes, order is not None)

    def rows(self, model: PreTrainedModel, criteria: StoppingCriteriaList, max_length: int) -> Rows:
        """Return the call's rows."""
        mask, pads, columns = self.given.get(mask_name(model)), [0] * len(self.ids), None
        if mask is not None:
            seen = mask.ne(0).long().to(self.ids.device)
            pads = (seen == 0).sum(dim=1).tolist()
            columns = seen.argsort(dim=1, stable=True) if self.holes else None  # the hidden ones first
        out = Rows(self.ids, pads, criteria, max_length, columns, self.unseen)
        out.mask, out.unknown, out.moved = self.mask, self.unknown, self.moved
        return out


def _has_holes(mask: torch.Tensor) -> bool:
    return bool((mask.ne(0).long().diff(dim=1) < 0).any())


def placeholder(config: GenerationConfig) -> int:
    """Return the token that stands for an embedding of none where a draft reads a prompt: BOS, or padding."""
    tokens = (getattr(config, f"_{name}_token_tensor", None) for name in ("bos", "pad"))
    return next((int(token.flatten()[0]) for token in tokens if token is not None), 0)


def find_ids(model: PreTrainedModel, embeddings: torch.Tensor) -> torch.Tensor:
    """Return the token ids, (B, n) int64, whose embeddings these are, (B, n, d), number by number; −1 for those of no token."""
    table, flat = base_of(model).get_input_embeddings(), embeddings.flatten(0, 1).to(device_of(model))
    out = torch.full(flat.shape[:1], -1, dtype=torch.int64, device=flat.device)
    known = tokens_known(model)
    for start in range(0, known, AT_ONCE):
        ids = torch.arange(start, min(start + AT_ONCE, known), device=flat.device)
        try:
            rows = table(ids)
        except FAILURES:  # a table that is asked otherwise
            break
        if rows.shape[1:] != flat.shape[1:]:
            break
        alike = (rows[:, None, :FEW] == flat[:, :FEW]).all(dim=-1)  # (rows, B · n)
        first = alike.long().argmax(dim=0)
        same = alike.any(dim=0) & (rows[first] == flat).all(dim=-1)
        out = torch.where(same, ids[first], out)
    return out.view(embeddings.shape[:2])


def _order(mask: torch.Tensor, first: int) -> torch.Tensor | None:
    """Return each row's columns (B, width) int64 with those that are hidden at its end in front of the others, from column `first` on."""
    seen, width = mask.ne(0), mask.shape[1]
    if bool(seen[:, -1].all()):
        return None
    hidden = seen.flip(1).long().argmax(dim=1, keepdim=True)  # at the end of each row
    if int(hidden.max()) >= width - first:
        first = 0
    columns = torch.arange(width, device=mask.device).expand_as(mask)
    turned = first + (columns - first - hidden) % (width - first)
    return torch.where(columns < first, columns, turned)


def _moved(value: torch.Tensor, order: torch.Tensor, last: bool) -> torch.Tensor:
    """Put the columns of `value` in this order (B, width): (B, width, …), or with `last` (…, B or 1, width)."""
    order = order.to(value.device)
    if last:
        return value.expand(*value.shape[:-2], *order.shape).gather(-1, order.expand(*value.shape[:-2], *order.shape))
    return value.gather(1, order.view(*order.shape, *[1] * (value.dim() - 2)).expand_as(value))


# -- PEFT's learned prompts -----------------------------------------------------------------------------------------------

PREPARE = "prepare_inputs_for_generation"


@contextmanager
def without_learned_prompt(model: PreTrainedModel) -> Iterator[Any]:
    """Within this context a model prepares inputs by itself; yield PEFT's model that did it in its place, to put a prompt in front, or None."""
    swapped = vars(model).get(PREPARE)
    wrapper = getattr(swapped, "__self__", model)
    if wrapper is model or model.config.is_encoder_decoder:
        yield None
        return
    del vars(model)[PREPARE]
    try:
        yield wrapper
    finally:
        setattr(model, PREPARE, swapped)


@torch.no_grad()
def with_learned_prompt(
    wrapper: Any, model: PreTrainedModel, kwargs: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """Return the arguments of a call with PEFT's learned prompt as embeddings in front of the text's, whose ids stay beside them.

    Raises: `ValueError` or `TypeError`, one line, for no prompt, and for what PEFT learned that is no embeddings (prefix tuning).
    """
    out = {name: value for name, value in kwargs.items() if name not in ("inputs", "task_ids")}
    ids: Any = kwargs.get("input_ids") if kwargs.get("inputs") is None else kwargs["inputs"]
    refuse_prompt(model, ids)
    learned = wrapper.get_prompt(
        batch_size=len(ids), **{name: kwargs[name] for name in ("task_ids",) if name in kwargs}
    )
    if not isinstance(learned, torch.Tensor) or out.get(EMBEDDINGS) is not None:
        raise ValueError(
            "the target has a learned prompt (PEFT) of keys and values, or was given embeddings beside one, which this loop cannot feed: use prompt "
            "tuning or an adapter such as LoRA, or drop lossy_policy"
        )
    texts, mask, padding = wrapper.word_embeddings(ids), out.get("attention_mask"), settings["pad_token_id"]
    if mask is None:
        ends = settings["eos_token_id"]
        ends = ends if isinstance(ends, list | tuple) else [ends]
        implied = padding is not None and padding not in ends  # as `generate` infers it
        mask = ids.ne(padding).long() if implied else torch.ones_like(ids)
    for limit, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if settings[new] is None and isinstance(settings[limit], int) and settings[limit] > ids.shape[1]:
            out[new] = settings[limit] - ids.shape[1]  # counted without the learned prompt
    embeddings = torch.cat([learned.to(texts), texts], dim=1)
    mask = torch.cat([mask.new_ones(len(ids), learned.shape[1]), mask], dim=1)
    return out | {"input_ids": ids, EMBEDDINGS: embeddings, "attention_mask": mask}
