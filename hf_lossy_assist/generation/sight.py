"""What the models of a call are given beside its text: the target what `generate` prepared, a draft that sees what the caller passed."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin

from ..batch.rows import Rows
from ..batch.token_types import types_for
from ..models.cached_model import REPEATED, ZERO
from ..models.compat import CACHE, CACHE_NAMES
from ..models.early_exit import leaves_early
from ..models.introspection import base_of
from ..models.multimodal import MultimodalRowModel, Prompt, is_multimodal, why_not_prompt
from ..models.probe import FAILURES, may_read_at_once, why_not_rows
from ..models.recurrent.layers import keeps_states
from ..validation import one_line
from .inputs import refuse_positions, stand
from .text_inputs import TEXT_INPUTS


TYPES = (*REPEATED, *ZERO)  # zeros for text


@dataclass(frozen=True)
class Sight:
    """What a call's target is given beside the text, and its draft can be.

    Args:
        prompt: the target's.
        passed: what the caller passed to `generate`, by name; None: the call came without this package's `generate`.
    """

    prompt: Prompt
    passed: Mapping[str, Any] | None

    def of(self, model: Any, target: Any, rows: Rows) -> Prompt | None:
        """The prompt of a call's model; None for one that reads text alone.

        Raises: `ValueError`, one line, for a draft that cannot be given what the target is given.
        """
        if model is target or leaves_early(model, target):
            return self.prompt
        if not reads_at_once(model):
            return None
        base, name = base_of(model), type(base_of(model)).__name__
        passed = self.passed
        if passed is None and not beside_text(self.prompt.given):
            passed = {"input_ids": self.prompt.ids, "attention_mask": self.prompt.mask}
        if passed is None:
            raise ValueError(
                f"{name} drafts from the same images, which custom_generate is not handed: pass lossy_policy=… to the enabled model's generate"
            )
        try:
            ids, given = prepared(base, rows, passed)
        except FAILURES as error:
            raise ValueError(
                f"the draft {name} cannot be given what the target is given ({one_line(error, 200)}): pass a draft of the target's family, or one "
                "that reads text alone"
            ) from error
        return Prompt(ids, given)


def show(model: Any, rows: Rows, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], passed: Mapping[str, Any] | None) -> None:  # fmt: skip
    """Have `rows` know what a decoder is given beside the ids: a sight, or the types of a text's tokens."""
    rows.multimodal = sight_of(model, rows, input_ids, model_kwargs, passed)
    if rows.multimodal is None:
        rows.token_types = types_for(model, rows, model_kwargs.get("token_type_ids"), input_ids)


def sight_of(model: Any, rows: Rows, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], passed: Mapping[str, Any] | None) -> Sight | None:  # fmt: skip
    """None for a text. `model_kwargs` as `generate` prepared them.

    Raises: `ValueError`, one line, for a prompt that ends in a token of an image's.
    """
    if not reads_at_once(model):
        return None
    given = {name: value for name, value in model_kwargs.items() if name not in (CACHE, *CACHE_NAMES)}
    types = {name: given[name] for name in TYPES if given.get(name) is not None}
    for name, its in types.items():
        if its.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(its.shape)}, input_ids {tuple(input_ids.shape)}: they must agree"
            )
    looks_ahead = any(bool(its.any()) for its in types.values())
    if not looks_ahead and not beside_text(given) and why_not_rows(model) is None:
        return None
    refuse_end(model, input_ids, given)
    prompt = Prompt(rows.ids[:, : rows.width], given)
    is_text = not looks_ahead and not beside_text(given)
    if is_text and why_not_prompt(model, prompt, rows.max_length) is not None:
        return None  # one row of it may go on on a cache of Transformers' own
    return Sight(prompt, passed)


def reads_at_once(model: Any) -> bool:
    """Whether a model takes more than text, and can be tried on it."""
    return is_multimodal(model) and may_read_at_once(model)


def beside_text(given: Mapping[str, Any]) -> list[str]:
    """The names of those inputs that are no text."""
    return [name for name, value in given.items() if name not in (*TEXT_INPUTS, *TYPES) and not _is_empty(value)]


def _is_empty(value: Any) -> bool:
    # `generate` hands `mm_encoder_outputs` to every model that could see, empty for a text.
    return value is None or (isinstance(value, dict) and all(its is None for its in value.values()))


def going_on(model: Any, rows: Rows, mask: torch.Tensor | None, positions: torch.Tensor | None) -> MultimodalRowModel:
    """A model that goes on from a cache in which there may be images: `positions` (…, 1 or B, width) of the text behind them may lag behind its tokens.

    Raises: `ValueError`, one line, for positions that do not lag by the same number.
    """
    out = MultimodalRowModel(None, model, len(rows.row_id_list), rows.max_length)
    stand(out, rows)
    if positions is not None:
        seen = torch.ones_like(rows.ids[:, : rows.width]) if mask is None else mask.ne(0).long()
        lag = positions[..., -1:] - seen.sum(dim=1, keepdim=True).to(positions.device) + 1
        refuse_positions(rows.ids[:, : rows.width], mask, positions - lag)
        out.offset = lag.expand(*lag.shape[:-2], len(rows.row_id_list), 1) if bool(lag.any()) else None
    return out


def refuse_sight(model: Any, model_kwargs: Mapping[str, Any], reason: str) -> None:
    """Refuse more than text where the target does not run on a cache of rows, for this `reason`: nobody has tried whether it goes on rightly there."""
    names = beside_text(model_kwargs) if is_multimodal(model) else []
    if [name for name in names if name not in (CACHE, *CACHE_NAMES)]:
        raise ValueError(
            f"{type(base_of(model)).__name__} is given more than text, and cannot be decoded in rows ({reason}): leave lossy_policy out"
        )


def refuse_unread(model: Any, rows: Rows, cache: Any, name: str) -> None:
    """Refuse an empty cache, passed by this name, for a prompt that must be read at once: what is passed is filled piece by piece."""
    at_once = why_not_rows(model) is not None or keeps_states(model)
    if rows.multimodal is not None and at_once and not int(cache.get_seq_length()):
        raise ValueError(
            f"{name} is empty, and {type(base_of(model)).__name__} reads a prompt at once: leave it out, and go on with the output's"
        )


def refuse_end(model: Any, input_ids: torch.Tensor, given: Mapping[str, Any]) -> None:
    """Refuse prompts whose last token stands for a piece of an image, for a round begins by reading it as text."""
    config = base_of(model).config
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    pieces = [its for its in (getattr(config, name, None) for name in names) if isinstance(its, int)]
    types = given.get("mm_token_type_ids")
    last = torch.isin(input_ids[:, -1], torch.tensor(pieces, dtype=input_ids.dtype, device=input_ids.device))
    if types is not None:
        last = last | types[:, -1].to(last.device).ne(0)
    if bool(last.any()):
        raise ValueError(
            f"row {int(last.nonzero()[0])} ends with a piece of an image, and a prompt must end with text: put a token behind it"
        )


def prepared(base: Any, rows: Rows, passed: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """What `generate` prepares for another model from the caller's inputs: ids (B, width), and the others by name."""
    taken = set(inspect.signature(base.forward).parameters) - {"inputs_embeds", "position_ids", CACHE, *CACHE_NAMES}
    own = {name: value for name, value in passed.items() if name in taken and value is not None}
    own.setdefault("input_ids", passed.get("inputs"))
    copies = len(rows.row_id_list) // len(own["input_ids"])
    found: list[Any] = []

    def keep(model: Any, input_ids: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        for name in ("logits_processor", "stopping_criteria", "generation_config"):
            given.pop(name, None)
        found.append((input_ids, given))
        return input_ids

    more = {"max_new_tokens": 1, "do_sample": copies > 1, "num_return_sequences": copies, "num_beams": 1}
    moved = {name: value.to(base.device) if isinstance(value, torch.Tensor) else value for name, value in own.items()}
    getattr(type(base), "generate", GenerationMixin.generate)(base, **moved, **more, custom_generate=keep)
    ids, given = found[0]
    return ids, {name: value for name, value in given.items() if name not in (CACHE, *CACHE_NAMES)}
