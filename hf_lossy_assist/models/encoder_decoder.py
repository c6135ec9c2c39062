"""The decoder of an encoder-decoder on a row cache, with cross-attention to each row's encoder output through a second
cache, filled once.

It must take the positions of its tokens, as Whisper and Moonshine do; one that counts them by the length of its cache
(BART, T5) has no rows.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MoEModelOutput
from transformers.utils import ModelOutput

from .facts import CACHE, ENCODED, facts_of
from .introspection import base_of, blocks_of, device_of, recall, takes_masks
from .probe import ROWS, probed, reference_logits, texts_to_try, why_rows_differ
from .quirks import patched_forward
from .row_cache import RowCache, RowLayer
from .row_model import RowModel


INPUTS = (ENCODED, "attention_mask")  # encoder arguments of every forward of such a decoder
# Other inputs of the decoder from `generate` that a row cache replaces or does not need.
REPLACED = (CACHE, "decoder_attention_mask", "use_cache", "logits_to_keep", "cache_position")


def attends_to_encoder(model: PreTrainedModel) -> bool:
    """Return whether the model is an encoder-decoder, or a decoder that attends to another model's encoder."""
    return bool(base_of(model).config.is_encoder_decoder) or facts_of(model).reads_encoder


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to each tensor in `value`: a tensor, a tuple or a model output.
    Anything else is returned unchanged."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):  # a `ModelOutput`
        return type(value)(**{name: map_tensors(item, change) for name, item in value.items()})
    return tuple(map_tensors(item, change) for item in value) if isinstance(value, tuple | list) else value


class CrossAttentionRowModel(RowModel):
    """A decoder on a `RowCache` with cross-attention to encoder outputs, for any number of rows of different lengths.

    Its self-attention is cached in rows, as in `RowModel`; keys and values of cross-attention are computed in the first
    forward.
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
        self.decodes_alone = self.facts.reads_encoder
        blocks = blocks_of(base_of(model))
        # The config of a separate Whisper decoder counts the encoder's layers.
        count = len(self.facts.layers or ()) if blocks is None else len(blocks)
        self.cache = RowCache(count, limit)
        self.both = EncoderDecoderCache(self.cache, DynamicCache())
        self.inputs = {name: map_tensors(value, lambda x: x.to(self.device)) for name, value in inputs.items()}
        if self.decodes_alone:
            self.inputs.pop("attention_mask", None)  # there it would mask the decoder's text
        self.positions = self.facts.position_argument
        self.packs, self.run = False, patched_forward(model, run=self._decoder)

    def _decoder(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: object, **others: object
    ) -> ModelOutput:
        prefix = "" if self.decodes_alone else "decoder_"
        text = {prefix + "input_ids": input_ids, prefix + "attention_mask": attention_mask, "return_dict": True}
        assert self.positions is not None, "`why_not_encoded_rows` has asked for it"
        return self.model(**text, **others | self.inputs | {CACHE: self.both, self.positions: position_ids})

    def select(self, rows: Sequence[int]) -> None:
        before, index = len(self.lengths), torch.tensor(rows, device=self.device)
        super().select(rows)
        self.both.cross_attention_cache.batch_select_indices(index)

        def selected(tensor: torch.Tensor) -> torch.Tensor:
            # Whisper also passes on the masks of audio that has ended, but reads no mask.
            return tensor[index] if tensor.dim() and len(tensor) == before else tensor

        self.inputs = {name: map_tensors(value, selected) for name, value in self.inputs.items()}

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        decoder = super().export(rows, mask)
        if decoder is None:
            return None
        cross = DynamicCache()
        for layer_idx, layer in enumerate(self.both.cross_attention_cache.layers):
            cross.update(layer.keys.clone(), layer.values.clone(), layer_idx)
        return EncoderDecoderCache(decoder, cross)


def why_not_encoded_rows(model: PreTrainedModel, inputs: Mapping[str, object] | None) -> str | None:
    """Return why this encoder-decoder, or decoder that reads an encoder, cannot run on a `CrossAttentionRowModel`; None
    if it can.

    `inputs`: the encoder's, in the same form; the probe attends to the first row's encoder output, and to its reverse.
    None: do not probe now.
    """
    base = base_of(model)
    facts = facts_of(base)
    if facts.layers is None or any(kind is not RowLayer for kind in facts.layers):
        return "its cache holds more than keys and values"
    if not takes_masks(facts.attention):
        return f"its attention implementation is {facts.attention!r} (load it with attn_implementation='sdpa')"
    if facts.rope is not None:
        return "its RoPE changes with the length of the text"
    if facts.position_argument is None:
        return "its decoder takes no positions, but counts them by the length of its cache"
    if inputs is None:
        recalled = recall(base, "encoded rows")
        return recalled if isinstance(recalled, str) else None
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
    inputs = {name: map_tensors(value, lambda tensor: tensor[row : row + 1]) for name, value in both.items()}
    if facts_of(base).reads_encoder:
        inputs.pop("attention_mask", None)
    inputs |= {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache()), "use_cache": True}
    name = "input_ids" if facts_of(base).reads_encoder else "decoder_input_ids"
    return reference_logits(lambda ids, _: base(**{name: ids}, **inputs), text, n)


def why_not_in_rows(
    model: PreTrainedModel, model_kwargs: Mapping[str, object], inputs: Mapping[str, object]
) -> str | None:
    """Return why this encoder-decoder cannot run on a `CrossAttentionRowModel` with a call's `model_kwargs`;
    `inputs`: those of `INPUTS`."""
    for name, value in model_kwargs.items():
        if name not in (*INPUTS, *REPLACED) and isinstance(value, torch.Tensor):
            return f"it was given {name}"
    return why_not_encoded_rows(model, inputs)


def ignores_hidden(model: PreTrainedModel, holes: bool) -> bool:
    """Return whether masked tokens do not affect the decoder's positions: these follow the mask or, without `holes`,
    are relative only."""
    base = base_of(model)
    if not holes and facts_of(base).table_end is None:
        return True
    ids, mask = torch.tensor([[0, 0, 0]]), torch.tensor([[0, 1, 1]])
    prepared = base.prepare_inputs_for_generation(ids, decoder_attention_mask=mask, is_first_iteration=True)
    positions = prepared.get("decoder_position_ids")
    return positions is not None and positions[0, 1:].tolist() == [0, 1]


def encode_for_draft(
    assistant: PreTrainedModel,
    target: PreTrainedModel,
    rows: int,
    inputs_tensor: torch.Tensor | None,
    model_kwargs: Mapping[str, Any],
) -> dict[str, object]:
    """Return the encoder states for a draft's decoder, for each of `rows` rows: from its encoder, or from the target's
    if it has no other.

    The target's are also used if the draft's encoder cannot read the input: embeddings without token, or
    `encoder_outputs` alone.
    Raises: `ValueError`, one line, if neither is available.
    """
    base, device, mask = base_of(assistant), device_of(assistant), model_kwargs.get("attention_mask")
    out: dict[str, object] = {} if mask is None else {"attention_mask": mask.to(device)}
    encoder = None if facts_of(assistant).reads_encoder else base.get_encoder()
    # `generate` passes negative ids if there is no input.
    unread = inputs_tensor is not None and not inputs_tensor.is_floating_point() and bool((inputs_tensor < 0).any())
    if inputs_tensor is None or unread or encoder in (None, base_of(target).get_encoder()):
        return (out if base.config.is_encoder_decoder else {}) | {
            ENCODED: _states_of_target(base, device, model_kwargs)
        }
    inputs: dict[str, object] = {base.main_input_name: inputs_tensor.to(device)}
    # Rows per input (`num_return_sequences`); the mask is already expanded.
    copies = rows // len(inputs_tensor)
    if mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters:
        inputs["attention_mask"] = mask.to(device)[::copies]
    encoded = encoder(**inputs, return_dict=True)
    if copies > 1:
        encoded = map_tensors(encoded, lambda tensor: tensor.repeat_interleave(copies, dim=0))
    return out | {ENCODED: encoded}


def _states_of_target(
    base: PreTrainedModel, device: torch.device, model_kwargs: Mapping[str, Any]
) -> BaseModelOutput | MoEModelOutput:
    """Return the states of the target's encoder for the draft `base`."""
    states = model_kwargs[ENCODED][0]
    kind = MoEModelOutput if getattr(base.config, "num_experts", 0) else BaseModelOutput  # decoders read its fields
    return kind(last_hidden_state=states.to(device=device, dtype=base.dtype))
