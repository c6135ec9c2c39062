"""The target of one call, on the cache that it can be rolled back in."""

from typing import Any

from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.compat import CACHE, takes_positions
from ..models.compiled.compilation import Compilation
from ..models.distributed import LockstepGroup, RankGroup
from ..models.introspection import base_of, is_tested
from ..models.multimodal import is_multimodal
from ..models.probe import keeps_states_alone, refuse_length, why_not_rows
from ..models.quirks.rope import ChangingRope
from ..models.recurrent.layers import why_not_adopted
from ..models.row_model import RowModel
from .encoder_inputs import make_encoder_decoder
from .input_checks import check_passed_cache, refuse_extra_inputs
from .model_factory import make_cropping_model, make_row_model, mask_name, refuse_positions
from .multimodal_inputs import TYPES, refuse_unread, refuse_unrowed, resume_from_cache


def make_target(
    model: Any,
    rows: Rows,
    model_kwargs: dict[str, Any],
    compilation: Compilation | None,
    cache_name: str | None,
    ranks: RankGroup | None = None,
) -> CachedModel:
    """Put the target on a cache of rows, or on Transformers' own.

    Args:
        cache_name: by which the caller passed the cache that is filled, or None. ranks: those that share the target.
    """
    base, several = base_of(model), len(rows.row_id_list) > 1
    if ranks is not None and compilation is not None:
        raise ValueError(
            "a target that is spread over ranks cannot be compiled here: pass disable_compile=True, or load it whole"
        )
    if isinstance(ranks, LockstepGroup) and not is_tested(base):
        raise ValueError(
            f"{type(base).__name__} must be tried before it is decoded in blocks, and is spread over ranks (FSDP2), which "
            "do not try it together: load it whole"
        )
    cache, name = model_kwargs.get(CACHE), cache_name or CACHE
    # `generate` marks a cache that it was given.
    passed = cache_name is not None or getattr(cache, "_is_user_defined", False)
    resumed = cache is not None and (passed or (not keeps_states_alone(cache) and cache.get_seq_length() > 0))
    why_not_copied = None
    if resumed:
        check_passed_cache(model, cache, rows.ids[:, : rows.width], rows.max_length, name)
        refuse_unread(model, rows, cache, name)
        rows.multimodal = None  # what the cache holds was seen before
        why_not_copied = _why_not_copied(model, cache, len(rows.row_id_list), ranks)
    adopted = resumed and why_not_copied is None
    if base.config.is_encoder_decoder and ranks is None:
        reason = "a cache was passed in" if resumed and not adopted else None
        return make_encoder_decoder(model, rows, model_kwargs, reason)
    reason = why_not_rows(model)
    if why_not_copied is not None and (reason is None or not several):
        reason = f"a cache was passed in, and {why_not_copied}" if several else "a cache was passed in"
    if not is_tested(base):
        refuse_length(model, rows.max_length)
    if reason is None or rows.multimodal is not None:
        target = _make_on_rows(model, rows, model_kwargs, None if adopted else compilation, ranks, adopted)
        counts = _counts_holes(target, base) if rows.has_holes else None
        if counts is None:
            if adopted:
                target.adopt(cache, model_kwargs.get(mask_name(model)))
            return target
        reason = f"its {counts} the tokens that attention_mask hides in the middle of a row"
    if ranks is not None:
        raise ValueError(
            f"a target that is spread over ranks must be fed row by row, and this one is not ({reason}): load it whole"
        )
    if not resumed:
        refuse_unrowed(model, model_kwargs, reason)
    return make_cropping_model(model, rows, model_kwargs, reason)


def _make_on_rows(
    model: Any,
    rows: Rows,
    model_kwargs: dict[str, Any],
    compilation: Compilation | None,
    ranks: RankGroup | None,
    adopted: bool,
) -> RowModel:
    """Put the target on a cache of rows. Raises: `ValueError`, one line, for inputs that cannot be followed there."""
    mask, positions = model_kwargs.get(mask_name(model)), model_kwargs.get("position_ids")
    if rows.multimodal is None:
        zeros = TYPES if is_multimodal(model) else ()  # what a processor says of a text
        refuse_extra_inputs({name: value for name, value in model_kwargs.items() if name not in zeros})
    if adopted and ranks is None and is_multimodal(model):
        return resume_from_cache(model, rows, mask, positions)
    if rows.multimodal is None:
        refuse_positions(rows.ids[:, : rows.width], mask, positions)
    target = make_row_model(model, model, rows, compilation=compilation, ranks=ranks)
    if ranks is not None and target.facts.keeps_states:
        raise ValueError(
            f"a target that is spread over ranks cannot keep a recurrent state, and {type(base_of(model)).__name__} does: load it whole"
        )
    if ranks is not None and target.rope is not None:
        raise ValueError(
            "a target that is spread over ranks cannot have RoPE that changes with the length of the text: load it whole"
        )
    return target


def _why_not_copied(model: Any, cache: object, rows: int, ranks: RankGroup | None) -> str | None:
    """Return why decoding goes on in a passed cache itself, and not in a copy of it; `ranks`: those that share the target."""
    if keeps_states_alone(cache):
        return "it counts no tokens"
    if ranks is not None:
        return "the target is spread over ranks"
    if rows > 1 and ChangingRope.of(base_of(model), rows) is not None:
        return "the target's RoPE changes with the length of the text"
    return why_not_adopted(model, cache, rows)


def _counts_holes(target: RowModel, base: Any) -> str | None:
    """Return what of a target on rows would count hidden tokens between others, which a cache of rows does not hold; None: nothing."""
    if target.facts.keeps_states:
        return "recurrent state counts"
    if not takes_positions(base) and not target.counts_columns:  # biases by the length of the cache
        return "position biases count"
    return None
