"""The decoder of an encoder-decoder on a cache of rows. What each row's encoder gave is attended to through a cache of its own, filled once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

from .architecture import Architecture
from .compat import CACHE
from .introspection import attention_of, base_of, blocks_of, has_fixed_rows
from .probe import probe_failure, texts_to_try, why_rows_differ
from .quirks.cache_positions import Seams, Standing, standing
from .quirks.rope import ChangingRope
from .row_cache import RowCache
from .row_layer import RowLayer
from .row_model import RowModel


ENCODED = "encoder_outputs"
INPUTS = (ENCODED, "attention_mask")  # what every forward of such a decoder is given of its encoder


def reads_encoder(model: Any) -> bool:
    """True for a decoder alone that reads another model's encoder, as `WhisperForCausalLM` does."""
    base = base_of(model)
    return not base.config.is_encoder_decoder and ENCODED in inspect.signature(base.forward).parameters


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value`, a tensor, a tuple, or an output of a model, with each of its tensors changed; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):  # a `ModelOutput`
        return type(value)(**{name: each_tensor(its, change) for name, its in value.items()})
    return tuple(each_tensor(its, change) for its in value) if isinstance(value, tuple | list) else value


class CrossAttentionRowModel(RowModel):
    """A decoder on a `RowCache` that attends to what an encoder gave: any number of rows, each with its own length.

    Its self-attention is cached by rows, as in `RowModel`; keys and values of its cross-attention are computed at the first forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        limit: int,
        vocabulary: int | None = None,
        *,
        inputs: Mapping[str, Any],
    ):
        """`inputs`: those of `INPUTS` that the call has, of as many rows; the rest as of `RowModel`."""
        super().__init__(model, rows, limit, vocabulary)
        base = base_of(model)
        self.decodes_alone = reads_encoder(model)
        blocks = blocks_of(base)
        # The config of Whisper's decoder alone counts the encoder's layers.
        count = len(self.facts.layers or ()) if blocks is None else len(blocks)
        self.cache = RowCache(count, limit)
        self.seams = Seams.of(model)
        self.both = EncoderDecoderCache(self.cache, DynamicCache())
        self.inputs = {name: each_tensor(value, lambda its: its.to(self.device)) for name, value in inputs.items()}
        if self.decodes_alone:
            self.inputs.pop("attention_mask", None)  # there it would be the text's
        self._entries: dict[int, torch.Tensor] = {}
        self.packs, self.run = False, self._run

    def _run(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
        use_cache: bool,
        **others: Any,
    ) -> Any:
        prefix = "" if self.decodes_alone else "decoder_"
        given = {
            prefix + "input_ids": input_ids,
            prefix + "attention_mask": attention_mask,
            "use_cache": use_cache,
            "return_dict": True,
            **{name: value for name, value in others.items() if name != CACHE},
            **self.inputs,
            CACHE: self.both,
        }
        where: Any = nullcontext()
        if self.seams.told is not None:
            given[self.seams.told] = position_ids
        elif len(position_ids) > 1 or self.cache.visible > self.last + 1 or self.seams.reads_tokens:
            # Else the cache's length says it: all rows go on from the same place.
            reach = min(self.cache.capacity, self.last + 1)
            where = standing(self.seams, Standing(position_ids, reach, self._entries))
        with where:
            return self.model(**given)

    def select(self, rows: Sequence[int]) -> None:
        before, kept = len(self.lengths), torch.tensor(rows, device=self.device)
        super().select(rows)
        self.both.cross_attention_cache.batch_select_indices(kept)

        def keep(its: torch.Tensor) -> torch.Tensor:
            # Whisper hands on the masks of sounds that have ended, too; it reads no mask.
            return its[kept] if its.dim() and len(its) == before else its

        self.inputs = {name: each_tensor(value, keep) for name, value in self.inputs.items()}

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        own = super().export(rows, mask)
        if own is None:
            return None
        cross = DynamicCache()
        for number, layer in enumerate(self.both.cross_attention_cache.layers):
            cross.update(layer.keys.clone(), layer.values.clone(), number)
        return EncoderDecoderCache(own, cross)


_encoded_in_rows: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


def why_not_encoded_rows(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str | None:
    """Why this encoder-decoder, or decoder that reads an encoder, cannot run on an `CrossAttentionRowModel`, or None if it can.

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
    if base not in _encoded_in_rows and has_fixed_rows(base):
        return "it has an adapter for each row, and so cannot be tried on rows of different length: call it once without adapter_names"
    if base not in _encoded_in_rows:
        _encoded_in_rows[base] = probe_failure(base, "rows of different length", lambda: _try_encoded(base, inputs))
    return _encoded_in_rows[base]


def _try_encoded(base: Any, inputs: Mapping[str, Any]) -> str | None:
    ids, n = texts_to_try(base, 2)
    alone = [{name: each_tensor(value, row) for name, value in inputs.items()} for row in (_first, _backwards)]
    both = {name: _joined(alone[0][name], alone[1][name]) for name in inputs}
    wanted = [_decoded_one_by_one(base, own, text, n) for own, text in zip(alone, ids, strict=True)]
    return why_rows_differ(lambda: CrossAttentionRowModel(base, 2, ids.shape[1] + 1, inputs=both), ids, n, wanted)


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


def _decoded_one_by_one(base: Any, inputs: Mapping[str, Any], text: torch.Tensor, n: int) -> torch.Tensor:
    """The logits behind `text`'s tokens from place n on, (BLOCK + 1, V), as `generate` comes by them, without this package."""
    own = dict(inputs)
    if reads_encoder(base):
        own.pop("attention_mask", None)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    name = "input_ids" if reads_encoder(base) else "decoder_input_ids"
    parts = [text[:n], *text[n:].split(1)]
    out = [base(**{name: part[None]}, **own, **{CACHE: cache}, use_cache=True).logits[0, -1] for part in parts]
    return torch.stack(out[1:])
