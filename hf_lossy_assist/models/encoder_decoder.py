"""The decoder of an encoder-decoder on a row cache, with cross-attention to each row's encoder output through a second cache, filled once."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.utils import ModelOutput

from .architecture import Architecture
from .compat import CACHE, ENCODED
from .introspection import attention_of, base_of, blocks_of
from .probe import ROWS, probed, reference_logits, texts_to_try, why_rows_differ
from .quirks import patched_forward
from .quirks.cache_positions import PositionSources
from .row_cache import RowCache, RowLayer
from .row_model import RowModel


INPUTS = (ENCODED, "attention_mask")  # encoder arguments of every forward of such a decoder


def reads_encoder(model: PreTrainedModel) -> bool:
    """Return whether a model is a separate decoder that reads another model's encoder, such as `WhisperForCausalLM`."""
    base = base_of(model)
    return not base.config.is_encoder_decoder and ENCODED in inspect.signature(base.forward).parameters


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to each tensor in `value`: a tensor, a tuple or a model output. Anything else is returned unchanged."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):  # a `ModelOutput`
        return type(value)(**{name: map_tensors(part, change) for name, part in value.items()})
    return tuple(map_tensors(part, change) for part in value) if isinstance(value, tuple | list) else value


class CrossAttentionRowModel(RowModel):
    """A decoder on a `RowCache` with cross-attention to encoder outputs, for any number of rows of different lengths.

    Its self-attention is cached in rows, as in `RowModel`; keys and values of cross-attention are computed in the first forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        limit: int,
        vocabulary: int | None = None,
        *,
        inputs: Mapping[str, object],
    ):
        """Take `inputs`: the `INPUTS` of the call, with as many rows. For the other arguments see `RowModel`."""
        super().__init__(model, rows, limit, vocabulary)
        self.decodes_alone = reads_encoder(model)
        blocks = blocks_of(base_of(model))
        # The config of a separate Whisper decoder counts the encoder's layers.
        count = len(self.facts.layers or ()) if blocks is None else len(blocks)
        self.cache = RowCache(count, limit)
        self.both = EncoderDecoderCache(self.cache, DynamicCache())
        self.inputs = {name: map_tensors(value, lambda part: part.to(self.device)) for name, value in inputs.items()}
        if self.decodes_alone:
            self.inputs.pop("attention_mask", None)  # there it would mask the decoder's text
        self.positions = PositionSources.of(model).argument
        self.packs, self.run = False, patched_forward(model, run=self._decoder)

    def _decoder(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: object, **others: object
    ) -> ModelOutput:
        prefix = "" if self.decodes_alone else "decoder_"
        given = {prefix + "input_ids": input_ids, prefix + "attention_mask": attention_mask, "return_dict": True}
        if self.positions is not None:
            given[self.positions] = position_ids
        return self.model(**given, **others | self.inputs | {CACHE: self.both})

    def select(self, rows: Sequence[int]) -> None:
        before, index = len(self.lengths), torch.tensor(rows, device=self.device)
        super().select(rows)
        self.both.cross_attention_cache.batch_select_indices(index)

        def selected(part: torch.Tensor) -> torch.Tensor:
            # Whisper also passes on the masks of audio that has ended, but reads no mask.
            return part[index] if part.dim() and len(part) == before else part

        self.inputs = {name: map_tensors(value, selected) for name, value in self.inputs.items()}

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        decoder = super().export(rows, mask)
        if decoder is None:
            return None
        cross = DynamicCache()
        for number, layer in enumerate(self.both.cross_attention_cache.layers):
            cross.update(layer.keys.clone(), layer.values.clone(), number)
        return EncoderDecoderCache(decoder, cross)


def why_not_encoded_rows(model: PreTrainedModel, inputs: Mapping[str, object]) -> str | None:
    """Return why this encoder-decoder, or decoder that reads an encoder, cannot run on a `CrossAttentionRowModel`; None if it can.

    `inputs`: the encoder's, in the same form; the probe attends to the first row's encoder output, and to its reverse.
    """
    base = base_of(model)
    facts = Architecture.of(base)
    if facts.layers is None or any(kind is not RowLayer for kind in facts.layers):
        return "its cache holds more than keys and values"
    attention = attention_of(facts.config)
    if attention not in ("sdpa", "eager"):
        return f"its attention implementation is {attention!r} (load it with attn_implementation='sdpa')"
    if facts.rope is not None:
        return "its RoPE changes with the length of the text"
    if not PositionSources.of(base).known:
        return "its decoder is told no positions, and they are in no table and no bias that is known"
    return probed(base, "encoded rows", ROWS, lambda: _try(base, inputs))


def _try(base: PreTrainedModel, inputs: Mapping[str, object]) -> str | None:
    ids, n = texts_to_try(base, 2)
    both = {name: map_tensors(value, _forwards_and_backwards) for name, value in inputs.items()}
    wanted = [_one_by_one(base, both, row, text, n) for row, text in enumerate(ids)]
    return why_rows_differ(lambda: CrossAttentionRowModel(base, 2, ids.shape[1] + 1, inputs=both), ids, n, wanted)


def _forwards_and_backwards(value: torch.Tensor) -> torch.Tensor:
    """Return the first row of an encoder's output or mask together with its reverse along the sequence, (2, S, …)."""
    return torch.cat([value[:1], value[:1].flip(1) if value.dim() > 1 else value[:1]])


def _one_by_one(
    base: PreTrainedModel, both: Mapping[str, object], row: int, text: torch.Tensor, n: int
) -> torch.Tensor:
    given = {name: map_tensors(value, lambda part: part[row : row + 1]) for name, value in both.items()}
    if reads_encoder(base):
        given.pop("attention_mask", None)
    given |= {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache()), "use_cache": True}
    name = "input_ids" if reads_encoder(base) else "decoder_input_ids"
    return reference_logits(lambda ids, _: base(**{name: ids}, **given), text, n)
