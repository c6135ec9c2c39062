"""What each setting of `generate` may be, checked at the call: a wrong type is one line here, and a traceback further on."""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch


def check_settings(given: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `ValueError`, one line, for a setting of another type or beyond its bounds; None is none."""
    for name, value in given.items():
        if value is not None and name in TYPES:
            TYPES[name](name, value)


def _whole(name: str, value: Any, low: int) -> None:
    expected = f"expected a whole number of at least {low}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {expected}, got {value!r}")
    if int(value) < low:
        raise ValueError(f"{name}: {expected}, got {value}")


def _number(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    expected = f"expected a number from {low:g} to {high:g}" if high < float("inf") else f"expected a number ≥ {low:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {expected}, got {value!r}")
    if not low <= float(value) <= high:
        raise ValueError(f"{name}: {expected}, got {value}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def _kind(name: str, value: Any, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def _texts(name: str, value: Any) -> None:
    if not isinstance(value, str) and not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
        raise TypeError(f"{name}: expected a text or a list of texts, got {value!r:.60}")


def _function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name}: expected a function of a row's number and its token ids, got {type(value).__name__}")


_ids = partial(_kind, kinds=(int, list, tuple, torch.Tensor), expected="a token id or a list of them")
_list = partial(_kind, kinds=(list, tuple, torch.Tensor), expected="a list of token ids")
_bias = partial(_kind, kinds=(dict, list), expected="a dict from tuples of token ids to numbers")

TYPES: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("max_length", "max_matching_ngram_size", "assistant_early_exit"), partial(_whole, low=1)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), partial(_whole, low=0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "bos_token_id", "forced_bos_token_id"), partial(_whole, low=0)),
    **dict.fromkeys(("max_time", "encoder_repetition_penalty"), partial(_number, low=0.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "top_h"), partial(_number, low=0.0, high=1.0)),
    **dict.fromkeys(("do_sample", "return_dict_in_generate", "output_scores", "output_logits"), _flag),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values"), _flag),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), _ids),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), _list),
    "sequence_bias": _bias,
    "stop_strings": _texts,
    "prefix_allowed_tokens_fn": _function,
    "logits_processor": partial(_kind, kinds=(list, tuple), expected="a list, such as LogitsProcessorList([…])"),
    "stopping_criteria": partial(_kind, kinds=(list, tuple), expected="a list, such as StoppingCriteriaList([…])"),
}
