"""What a decoder is given for a text, and nothing else."""

from typing import Any

from ..models.compat import CACHE


# What a decoder on a `RowCache` may be given by `generate`.
TEXT_INPUTS = {
    "attention_mask",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
    "token_type_ids",
}


def refuse_extra_inputs(model_kwargs: dict[str, Any]) -> None:
    """Refuse inputs other than text, such as images, for a model that runs on a `RowCache`."""
    for name, value in model_kwargs.items():
        if name == "mm_encoder_outputs" and isinstance(value, dict):
            # `generate` hands one to every model that could see, empty for a text; what it encoded itself stands in it by kind.
            kinds = [kind for kind, encoded in value.items() if encoded is not None]
            name, value = f"{' and '.join(kinds)} inputs", kinds or None
        if name not in TEXT_INPUTS and value is not None:
            raise ValueError(
                f"lossy_policy handles text alone, and the model was also given {name}: leave {name} or lossy_policy out"
            )
