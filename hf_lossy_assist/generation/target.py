"""The target of one call, on the cache that it can be rolled back in."""

from typing import Any

from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.compat import CACHE, takes_positions
from ..models.compiled.compilation import Compilation
from ..models.distributed.sharded import LockstepGroup, RankGroup
from ..models.introspection import base_of, is_tested
from ..models.multimodal import is_multimodal
from ..models.probe import keeps_states_alone, refuse_length, why_not_rows
from ..models.quirks.rope import ChangingRope
from ..models.recurrent.layers import why_not_adopted
from ..models.row_model import RowModel
from .encoded import encoded_model
from .inputs import cropping, mask_name, refuse_positions, rowwise
from .passed_cache import check_passed
from .sight import TYPES, going_on, refuse_sight, refuse_unread
from .text_inputs import refuse_extra_inputs


def target_of(
    model: Any, rows: Rows, model_kwargs: dict[str, Any], compilation: Compilation | None, given_as: str | None, ranks: RankGroup | None = None
) -> CachedModel:  # fmt: skip
    """The target on a cache of rows, or on Transformers' own.

    Args:
        given_as: by which name the caller passed the cache that is filled, or None. ranks: those that share it.
    """
    if ranks is not None and compilation is not None:
        raise ValueError(
            "a target that is spread over ranks cannot be compiled here: pass disable_compile=True, or load it whole"
        )
    if isinstance(ranks, LockstepGroup) and not is_tested(base_of(model)):
        raise ValueError(
            f"{type(base_of(model)).__name__} must be tried before it is decoded in blocks, and is spread over ranks (FSDP2), which "
            "do not try it together: load it whole"
        )
    given = model_kwargs.get(CACHE)
    own = given_as is not None or getattr(given, "_is_user_defined", False)  # `generate` marks one that it was given
    continued = given is not None and (own or (not keeps_states_alone(given) and given.get_seq_length() > 0))
    if continued:
        check_passed(model, given, rows.ids[:, : rows.width], rows.max_length, given_as or CACHE)
        refuse_unread(model, rows, given, given_as or CACHE)
        rows.multimodal = None  # what the cache holds was seen before
    several = len(rows.row_id_list) > 1
    stays = _why_not_copied(model, given, len(rows.row_id_list), ranks) if continued else None
    adopted = continued and stays is None
    if base_of(model).config.is_encoder_decoder and ranks is None:
        return encoded_model(model, rows, model_kwargs, "a cache was passed in" if continued and not adopted else None)
    reason = why_not_rows(model)
    if stays is not None and (reason is None or not several):
        reason = f"a cache was passed in, and {stays}" if several else "a cache was passed in"
    if not is_tested(base_of(model)):
        refuse_length(model, rows.max_length)
    if reason is None or rows.multimodal is not None:
        mask = model_kwargs.get(mask_name(model))
        target = _on_rows(model, rows, model_kwargs, None if adopted else compilation, ranks, adopted)
        counts = _counts_holes(target, base_of(model)) if rows.has_holes else None
        if counts is None:
            if adopted:
                target.adopt(given, mask)
            return target
        reason = f"its {counts} the tokens that attention_mask hides in the middle of a row"
    if ranks is not None:
        raise ValueError(
            f"a target that is spread over ranks must be fed row by row, and this one is not ({reason}): load it whole"
        )
    if not continued:
        refuse_sight(model, model_kwargs, reason)
    return cropping(model, rows, model_kwargs, reason)


def _on_rows(
    model: Any, rows: Rows, model_kwargs: dict[str, Any], compilation: Compilation | None, ranks: RankGroup | None, adopted: bool
) -> RowModel:  # fmt: skip
    """The target on a cache of rows. Raises: `ValueError`, one line, for what it is given that cannot be followed there."""
    mask, positions = model_kwargs.get(mask_name(model)), model_kwargs.get("position_ids")
    if rows.multimodal is None:
        zeros = TYPES if is_multimodal(model) else ()  # what a processor says of a text
        refuse_extra_inputs({name: value for name, value in model_kwargs.items() if name not in zeros})
    if adopted and ranks is None and is_multimodal(model):
        return going_on(model, rows, mask, positions)
    if rows.multimodal is None:
        refuse_positions(rows.ids[:, : rows.width], mask, positions)
    target = rowwise(model, model, rows, compilation=compilation, ranks=ranks)
    if ranks is not None and target.facts.keeps_states:
        raise ValueError(
            f"a target that is spread over ranks cannot keep a recurrent state, and {type(base_of(model)).__name__} does: load it whole"
        )
    if ranks is not None and target.rope is not None:
        raise ValueError(
            "a target that is spread over ranks cannot have RoPE that changes with the length of the text: load it whole"
        )
    return target


def _why_not_copied(model: Any, given: Any, rows: int, ranks: RankGroup | None) -> str | None:
    """Why a cache that was passed in is gone on with where it is, and not copied; `ranks`: those that share the target."""
    if keeps_states_alone(given):
        return "it counts no tokens"
    if ranks is not None:
        return "the target is spread over ranks"
    if rows > 1 and ChangingRope.of(base_of(model), rows) is not None:
        return "the target's RoPE changes with the length of the text"
    return why_not_adopted(model, given, rows)


def _counts_holes(target: RowModel, base: Any) -> str | None:
    """What of a target on rows would count hidden tokens between others, which a cache of rows does not hold; None: nothing."""
    if target.facts.keeps_states:
        return "recurrent state counts"
    if not takes_positions(base) and not target.counts_columns:  # biases by the length of the cache
        return "position biases count"
    return None
