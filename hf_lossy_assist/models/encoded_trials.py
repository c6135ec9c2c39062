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
from .one_by_one import same
from .rope import ChangingRope
from .row_layer import RowLayer
from .trials import BLOCK, texts_to_try
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
    """Two rows of one length, a wrong block, rollback, the right block, rows of different length; then prompts of different length."""
    ids, n = texts_to_try(base, 2)
    alone = [{name: each_tensor(value, row) for name, value in inputs.items()} for row in (_first, _backwards)]
    both = {name: _joined(alone[0][name], alone[1][name]) for name in inputs}
    wanted = [_one_by_one(base, own, text, n) for own, text in zip(alone, ids, strict=True)]  # (BLOCK + 1, V) each
    runner = EncodedRowModel(base, 2, ids.shape[1] + 1, inputs=both)
    runner.feed(torch.cat([ids[:, :n], ids.flip(0)[:, -BLOCK:]], dim=1), [n + BLOCK] * 2, keep=BLOCK + 1)
    for what, held in {"rows of one length": [n, n], "rows of different length": [n + 1, n]}.items():
        runner.rollback(held)
        blocks = torch.stack([text[start : start + BLOCK] for text, start in zip(ids, held, strict=True)])
        got = runner.feed(blocks, [BLOCK] * 2, keep=BLOCK)
        if not same(got, torch.stack([w[h - n :][:BLOCK] for w, h in zip(wanted, held, strict=True)]), runner.dtype):
            return f"a trial on {what} did not give what it gives one token at a time"
    ragged = EncodedRowModel(base, 2, ids.shape[1] + 1, inputs=both)
    ragged.feed(ids[:, :n], [n, n - 2], keep=0)
    ragged.feed(torch.stack([ids[0, n : n + 3], ids[1, n - 2 : n + 1]]), [1, 3])
    got = ragged.feed(ids[:, n + 1 : n + 2], [1, 1], keep=1)
    if not same(got, torch.stack([w[1:2] for w in wanted]), runner.dtype):
        return "a trial on prompts of different length did not give what it gives one token at a time"
    return None


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
