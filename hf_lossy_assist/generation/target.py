"""The target of one call, on the cache that it can be rolled back in."""

from typing import Any

from ..batch.rows import Rows
from ..models.cache_name import CACHE
from ..models.cached import CachedModel
from ..models.compilation import Compilation
from ..models.in_step import Steps
from ..models.inspect import base_of, is_tested
from ..models.layer_kinds import may_adopt
from ..models.led import Ranks
from ..models.trials import keeps_states_alone, refuse_length, why_not_rows
from .encoded import encoded_model
from .inputs import cropping, mask_name, refuse_positions, rowwise
from .passed_cache import check_passed
from .unsupported import refuse_extra_inputs


def target_of(
    model: Any, rows: Rows, model_kwargs: dict[str, Any], compilation: Compilation | None, given_as: str | None, ranks: Ranks | Steps | None = None
) -> CachedModel:  # fmt: skip
    """The target on a cache of rows, or on Transformers' own.

    Args:
        given_as: by which name the caller passed the cache that is filled, or None. ranks: those that share it.
    """
    if ranks is not None and compilation is not None:
        raise ValueError(
            "a target that is spread over ranks cannot be compiled here: pass disable_compile=True, or load it whole"
        )
    if isinstance(ranks, Steps) and not is_tested(base_of(model)):
        raise ValueError(
            f"{type(base_of(model)).__name__} must be tried before it is decoded in blocks, and is spread over ranks (FSDP2 or ZeRO-3), which "
            "do not try it together: load it whole"
        )
    given = model_kwargs.get(CACHE)
    own = given_as is not None or getattr(given, "_is_user_defined", False)  # `generate` marks one that it was given
    continued = given is not None and (own or (not keeps_states_alone(given) and given.get_seq_length() > 0))
    if continued:
        check_passed(model, given, rows.ids[:, : rows.width], rows.max_length, given_as or CACHE)
    adopted = continued and not keeps_states_alone(given) and may_adopt(model, given)
    passed = "a cache was passed in" if continued and not adopted else None
    if base_of(model).config.is_encoder_decoder and ranks is None:
        return encoded_model(model, rows, model_kwargs, passed)
    reason = passed or why_not_rows(model)
    if not is_tested(base_of(model)):
        refuse_length(model, rows.max_length)
    if reason is None:
        refuse_extra_inputs(model_kwargs)
        mask = model_kwargs.get(mask_name(model))
        refuse_positions(rows.ids[:, : rows.width], mask, model_kwargs.get("position_ids"))
        target = rowwise(model, model, rows, compilation=None if adopted else compilation, ranks=ranks)
        if ranks is not None and target.facts.keeps_states:
            raise ValueError(
                f"a target that is spread over ranks cannot keep a recurrent state, and {type(base_of(model)).__name__} does: load it whole"
            )
        if ranks is not None and target.rope is not None:
            raise ValueError(
                "a target that is spread over ranks cannot have RoPE that changes with the length of the text: load it whole"
            )
        if not rows.holes or target.reach >= rows.max_length:
            if adopted:
                target.adopt(given, mask)
            return target
        counts = "recurrent state" if target.facts.keeps_states else "window"
        reason = f"its {counts} counts the tokens that attention_mask hides in the middle of a row"
    if ranks is not None:
        raise ValueError(
            f"a target that is spread over ranks must be fed row by row, and this one is not ({reason}): load it whole"
        )
    return cropping(model, rows, model_kwargs, reason)
