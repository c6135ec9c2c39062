"""Whether an encoder-decoder's rows of different length give what each gives one token at a time: tried once for each model object."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from .architecture import Architecture
from .cache_name import CACHE
from .decoder_places import Seams
from .encoded import EncodedRowModel, each_tensor, reads_encoder
from .inspect import attention_of, base_of, has_fixed_rows
from .rope import ChangingRope
from .row_layer import RowLayer
from .trials import texts_to_try, why_rows_differ
from .trying import told


_in_rows: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def why_not_encoded_rows(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str | None:
    """Why this encoder-decoder, or decoder that reads an encoder, cannot run on an `EncodedRowModel`, or None if it can.

    `inputs`: as that takes them; the trial attends to the first row's encoder output, and to the same backwards.
    """
    base = base_of(model)
    facts = Architecture.of(base)
    if facts.layers is None or any(kind is not RowLayer for kind in facts.layers):
        return "its cache holds more than keys and values"
    if attention_of(facts.config) not in ("sdpa", "eager"):
        return (
            f"its attention implementation is {attention_of(facts.config)!r} (load it with attn_implementation='sdpa')"
        )
    if ChangingRope.of(base, 1) is not None:
        return "its RoPE changes with the length of the text"
    if not Seams.of(model).known:
        return "its decoder is told no positions, and they are in no table and no bias that is known"
    if base not in _in_rows and has_fixed_rows(base):
        return "it has an adapter for each row, and so cannot be tried on rows of different length: call it once without adapter_names"
    if base not in _in_rows:
        _in_rows[base] = told(base, "rows of different length", lambda: _try(base, inputs))
    return _in_rows[base]


def _try(base: Any, inputs: Mapping[str, Any]) -> str | None:
    ids, n = texts_to_try(base, 2)
    alone = [{name: each_tensor(value, row) for name, value in inputs.items()} for row in (_first, _backwards)]
    both = {name: _joined(alone[0][name], alone[1][name]) for name in inputs}
    wanted = [_one_by_one(base, own, text, n) for own, text in zip(alone, ids, strict=True)]
    return why_rows_differ(lambda: EncodedRowModel(base, 2, ids.shape[1] + 1, inputs=both), ids, n, wanted)


def _first(value: torch.Tensor) -> torch.Tensor:
    """The first row of an encoder's output or mask, (1, S, …)."""
    return value[:1]


def _backwards(value: torch.Tensor) -> torch.Tensor:
    """The same with its places backwards."""
    return value[:1].flip(1) if value.dim() > 1 else value[:1]


def _joined(first: Any, second: Any) -> Any:
    """Two rows as a batch."""
    theirs: list[torch.Tensor] = []

    def note(its: torch.Tensor) -> torch.Tensor:
        theirs.append(its)
        return its

    each_tensor(second, note)
    return each_tensor(first, lambda its: torch.cat([its, theirs.pop(0)]))


def _one_by_one(base: Any, inputs: Mapping[str, Any], text: torch.Tensor, n: int) -> torch.Tensor:
    """The logits behind `text`'s tokens from place n on, (BLOCK + 1, V), as `generate` comes by them, without this package."""
    own = dict(inputs)
    if reads_encoder(base):
        own.pop("attention_mask", None)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    name = "input_ids" if reads_encoder(base) else "decoder_input_ids"
    parts = [text[:n], *text[n:].split(1)]
    out = [base(**{name: part[None]}, **own, **{CACHE: cache}, use_cache=True).logits[0, -1] for part in parts]
    return torch.stack(out[1:])
