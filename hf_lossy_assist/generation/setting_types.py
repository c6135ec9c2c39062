"""What each setting of `generate` may be, checked at the call: a wrong type is one line here, and a traceback further on."""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from transformers import WatermarkingConfig

from ..validation import MOST, shown


LONGEST_NGRAM = 10_000  # Transformers makes a list of so many slices for every token


def check_settings(given: Mapping[str, Any], config: Any, way_out: Callable[[str, Any], str]) -> None:
    """Raise `TypeError` or `ValueError`, one line, for a setting of another type or beyond its bounds; None is none.

    Args:
        given: the call's arguments. Where it has no setting, that of `config` counts.
        way_out: how to be rid of a setting of `config`, by its name and the value that does nothing.
    """
    for name, check in TYPES.items():
        value = given[name] if name in given else getattr(config, name, None)
        if value is None:
            continue
        try:
            check(name, value)
        except (TypeError, ValueError) as error:
            if name in given:
                raise
            raise type(error)(f"{error}: {way_out(name, None)}") from None


def _whole(name: str, value: Any, low: int, high: int = MOST) -> None:
    expected = f"expected a whole number of at least {low}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {expected}, got {shown(value)}")
    if int(value) < low:
        raise ValueError(f"{name}: {expected}, got {shown(value)}")
    if int(value) > high:
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, got {shown(value)}")


def _number(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    expected = f"expected a number from {low:g} to {high:g}" if high < float("inf") else f"expected a number ≥ {low:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {expected}, got {shown(value)}")
    try:
        fits = low <= float(value) <= high
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: {expected}, got {shown(value)}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")


def _kind(name: str, value: Any, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def _texts(name: str, value: Any) -> None:
    if not isinstance(value, str) and not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
        raise TypeError(f"{name}: expected a text or a list of texts, got {shown(value)}")


def _function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name}: expected a function of a row's number and its token ids, got {type(value).__name__}")


def _functions(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise TypeError(f"{name}: expected a list of functions of (input_ids, scores), got {shown(value)}")


def _watermark(name: str, value: Any) -> None:
    if not isinstance(value, dict) and not hasattr(value, "construct_processor"):
        raise TypeError(f"{name}: expected a {WatermarkingConfig.__name__}, got {type(value).__name__}")


def _ids(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        fits = value.dtype in (torch.int64, torch.int32) and value.dim() < 2 and value.device.type != "meta"
    else:
        values = value if isinstance(value, list | tuple) else [value]
        fits = all(isinstance(v, Integral) and not isinstance(v, bool) and -(2**63) <= int(v) < 2**63 for v in values)
    if not fits:
        raise TypeError(f"{name}: expected a token id or a list of them, got {shown(value)}")


_list = partial(_kind, kinds=(list, tuple, torch.Tensor), expected="a list of token ids")
_bias = partial(_kind, kinds=(dict, list), expected="a dict from tuples of token ids to numbers")

TYPES: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(
        ("max_length", "max_matching_ngram_size", "assistant_early_exit", "num_beams"), partial(_whole, low=1)
    ),
    **dict.fromkeys(("prefill_chunk_size", "assistant_lookbehind", "target_lookbehind"), partial(_whole, low=1)),
    **dict.fromkeys(("min_length", "min_new_tokens"), partial(_whole, low=0)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), partial(_whole, low=0, high=LONGEST_NGRAM)
    ),
    "forced_bos_token_id": partial(_whole, low=0),
    **dict.fromkeys(("max_time", "encoder_repetition_penalty", "repetition_penalty"), partial(_number, low=0.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "top_h"), partial(_number, low=0.0, high=1.0)),
    **dict.fromkeys(("guidance_scale", "penalty_alpha", "diversity_penalty"), partial(_number, low=float("-inf"))),
    "assistant_ensemble_weight": partial(_number, low=float("-inf")),
    **dict.fromkeys(("do_sample", "return_dict_in_generate", "output_scores", "output_logits", "use_cache"), _flag),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "synced_gpus", "token_healing"), _flag),
    **dict.fromkeys(("disable_compile", "low_memory"), _flag),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "is_assistant", "use_mtp"), _flag),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "forced_eos_token_id", "pad_token_id", "decoder_start_token_id"), _ids
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), _list),
    **dict.fromkeys(("logits_processor", "stopping_criteria"), _functions),
    "sequence_bias": _bias,
    "stop_strings": _texts,
    "prefix_allowed_tokens_fn": _function,
    "watermarking_config": _watermark,
}
