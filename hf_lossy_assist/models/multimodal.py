"""Multimodal prefill: a prompt with images or audio is read once, as in `generate`, then decoded on a row cache like
text.

A prompt of embeddings is read likewise; the embedding of its last place comes with the first block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from .cached_model import MASK, POSITIONS, REPEATED, GrowingInputs, ModelInputs
from .facts import CACHE
from .introspection import base_of, cached_per_model, device_of, remember
from .patching import padded_left
from .probe import BLOCK, DIFFERS, probe_failure, same
from .quirks import patched_forward
from .row_model import RowModel


EMBEDDINGS = "inputs_embeds"


@cached_per_model
def is_multimodal(base: PreTrainedModel) -> bool:
    """Return whether a decoder takes more than text."""
    kinds = getattr(base, "input_modalities", "text")
    return not base.config.is_encoder_decoder and kinds not in ("text", ("text",), ["text"])


@dataclass(frozen=True)
class Prompt:
    """The prompts of a call.

    Args:
        ids: (B, width) int64, hidden tokens included.
        inputs: the model's other inputs as `generate` prepared them, except the cache.
        arguments: the caller's of `generate`, by name, for a draft; None: the call did not come through this package's
            `generate`.
    """

    ids: torch.Tensor
    inputs: ModelInputs
    arguments: Mapping[str, object] | None = None

    @property
    def mask(self) -> torch.Tensor | None:  # (B, width), 0 where a token is hidden
        return self.inputs.get(MASK)

    @property
    def embeddings(self) -> torch.Tensor | None:  # (B, width, d), which stand for the ids
        return self.inputs.get(EMBEDDINGS)


class Prefill:
    """A prompt that a model reads and continues as in `generate`: on Transformers' cache, with padded rows."""

    def __init__(self, model: PreTrainedModel, prompt: Prompt, width: int):
        """Read the first `width` positions of the prompt: all, or all but the last."""
        self.model, self.base = model, base_of(model)
        device = device_of(self.base)
        self.cache: Cache = DynamicCache(config=self.base.config.get_text_config(decoder=True))
        # A window layer keeps only what the next token needs, but here the last token is read again.
        self.cache.layers = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in self.cache.layers
        ]
        self.ids, self.inputs = prompt.ids.to(device), dict(prompt.inputs) | {"use_cache": True}
        if prompt.embeddings is not None:
            self.inputs[EMBEDDINGS] = prompt.embeddings.to(device)
        if "logits_to_keep" in self.inputs:
            self.inputs["logits_to_keep"] = 1
        self.growing = GrowingInputs(self.inputs, False, device)
        self.logits = self._run(width, is_first_iteration=True)

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Read one more token of each row, `tokens` (B, 1) or the prompt's next; return the logits after it, (B, V)."""
        if tokens is not None:
            self.ids = torch.cat([self.ids, tokens.to(self.ids.device)], dim=1)
        embedded = tokens is None and EMBEDDINGS in self.inputs
        return self._run(int(self.cache.get_seq_length()) + 1, next_sequence_length=1, is_first_iteration=embedded)

    def _run(self, end: int, **how: object) -> torch.Tensor:
        out = self.model(**self._inputs(self.ids[:, :end], **how), return_dict=True)
        if out.get(CACHE) is None:  # it keeps its states in its modules
            raise ValueError(
                f"{type(self.base).__name__} returns no cache, on which a round could go on: leave lossy_policy out"
            )
        self.cache = out[CACHE]
        layers = [layer for layer in self.cache.layers if getattr(layer, "keys", None) is not None]
        lengths = {int(layer.get_seq_length()) for layer in layers}
        if lengths - {end}:
            raise ValueError(
                f"{type(self.base).__name__} keeps {', '.join(map(str, sorted(lengths)))} places in its cache for a "
                f"prompt of {end} tokens, and a round can only go on from a place for each: leave lossy_policy out"
            )
        return out.logits[:, -1]

    def _inputs(self, ids: torch.Tensor, **how: object) -> ModelInputs:
        inputs = self.inputs | {CACHE: self.cache} | self.growing.up_to(ids.shape[1]) | how
        if inputs.get(EMBEDDINGS) is not None:
            inputs[EMBEDDINGS] = inputs[EMBEDDINGS][:, : ids.shape[1]]
        return self.base.prepare_inputs_for_generation(ids, **inputs)

    def next_inputs(self) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Return the next token's inputs: its position minus the number of tokens before it, (…, B, 1), None for zeros;
        types (B, 1)."""
        width = self.ids.shape[1]
        inputs = self._inputs(torch.nn.functional.pad(self.ids, (0, 1)), next_sequence_length=1)
        types = {name: inputs[name] for name in REPEATED if inputs.get(name) is not None}
        positions = inputs.get(POSITIONS)
        if positions is None:
            return None, types
        mask = self.growing.mask
        counts = torch.full((len(self.ids),), width) if mask is None else mask.ne(0).sum(dim=1)
        offset = positions[..., -1:] - counts[:, None].to(positions.device)  # (…, B, 1)
        return (offset if bool(offset.any()) else None), types


def why_not_prompt(model: PreTrainedModel, prompt: Prompt, limit: int) -> str | None:
    """Return why a model's blocks after such a prompt differ from single tokens, or None if they do not: tried once for
    prompts of these inputs.

    `limit`: see `RowModel`. Raises: any error of the model at the prompt itself, as in `generate`.
    """
    base = base_of(model)

    def probe() -> str | None:
        scratch = MultimodalRowModel(None, model, len(prompt.ids), limit)
        scratch.last += BLOCK + 1  # beyond the call's last token
        prefill = scratch.read(prompt)
        return probe_failure(base, "its prompt", lambda: scratch.trial(prompt, prefill))

    names = frozenset(name for name, value in prompt.inputs.items() if value is not None)
    return remember(base, ("prompt", names), probe)


class MultimodalRowModel(RowModel):
    """A `RowModel` that has read a `Prompt`: rounds begin at each row's last token, which must be text or an embedding.

    Positions after the prompt differ per row where images take fewer positions than tokens (Qwen-VL). The first `feed`
    raises `ValueError` for a model whose blocks after such a prompt differ from single tokens.
    """

    def __init__(
        self, prompt: Prompt | None, model: PreTrainedModel, rows: int, limit: int, vocabulary: int | None = None
    ):
        """Take a prompt with as many rows, or None to adopt a filled cache, and the arguments of `RowModel`."""
        super().__init__(model, rows, limit, vocabulary)
        self.needs_prefill, self.packs = True, False
        self.prompt = prompt
        self.offset: torch.Tensor | None = None  # (…, B, 1): each row's positions minus its number of tokens
        self.types: dict[str, torch.Tensor] = {}  # (B, 1): further inputs of each token of a row
        self.opening: torch.Tensor | None = None  # (B, 1, d): the embedding with which the next forward begins
        self.run = partial(self._run, patched_forward(model))

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        if self.prompt is None:
            return super().feed(tokens, counts, keep)
        prompt, self.prompt = self.prompt, None
        reason = why_not_prompt(self.model, prompt, self.cache.limit)
        if reason is not None:
            raise ValueError(
                f"{type(base_of(self.model)).__name__} cannot go on in blocks from this prompt ({reason}): leave "
                "lossy_policy out"
            )
        logits = self.read(prompt).logits
        return logits[:, None][:, :0] if keep == 0 else super().feed(tokens, counts, keep)

    def _run(self, run: Callable[..., ModelOutput], position_ids: torch.Tensor, **inputs: torch.Tensor) -> ModelOutput:
        types = {name: value.expand(-1, position_ids.shape[-1]) for name, value in self.types.items()}
        if self.offset is not None:
            position_ids = position_ids + self.offset
        if self.opening is not None:
            tokens = base_of(self.model).get_input_embeddings()(inputs.pop("input_ids")[:, 1:])
            inputs[EMBEDDINGS], self.opening = torch.cat([self.opening.to(tokens), tokens], dim=1), None
        return run(position_ids=position_ids, **inputs, **types)

    def read(self, prompt: Prompt) -> Prefill:
        """Read the prompt and adopt its cache."""
        width = prompt.ids.shape[1] - self.facts.keeps_states  # a state cannot be rolled back into the prompt
        if not width:
            raise ValueError(
                f"{type(base_of(self.model)).__name__} keeps a recurrent state, and begins with more than one place: "
                "pass a longer prompt"
            )
        mask = None if prompt.mask is None else prompt.mask[:, :width]
        with padded_left(mask):
            prefill = Prefill(self.model, prompt, width)
        self.adopt(prefill.cache, mask)
        rows = len(self.lengths)
        if self.cache.log is not None:
            self.cache.log.prompts = [length + 1 for length in self.lengths]
        else:
            self.rollback([length - 1 for length in self.lengths])
        offset, types = prefill.next_inputs()
        self.offset = None if offset is None else offset.expand(*offset.shape[:-2], rows, 1)
        self.types = {name: value.expand(rows, 1) for name, value in types.items()}
        self.opening = None if prompt.embeddings is None else prompt.embeddings[:, -1:].to(self.device)
        return prefill

    def trial(self, prompt: Prompt, prefill: Prefill) -> str | None:
        """Feed a block after the prompt, of which rows keep different numbers of tokens, then single tokens;
        return None if all logits agree."""
        start, rows = list(self.lengths), range(len(self.lengths))
        tokens = [prompt.ids[:, -1:].to(self.device)]
        wanted = [prefill.step() if self.facts.keeps_states else prefill.logits]
        for _ in range(BLOCK):
            tokens.append(wanted[-1].argmax(dim=-1, keepdim=True))
            wanted.append(prefill.step(tokens[-1]))
        block, right = torch.cat(tokens, dim=1), torch.stack(wanted, dim=1)  # (B, 1 + BLOCK), (B, 1 + BLOCK, V)
        got = self.feed(block, [BLOCK + 1] * len(start), keep=BLOCK + 1)
        if not same(got, right, self.dtype):
            return f"a trial on a block {DIFFERS}"
        good = [1 + b % BLOCK for b in rows]
        self.rollback([a + n for a, n in zip(start, good, strict=True)])
        again = self.feed(block[rows, good][:, None], [1] * len(start), keep=1)
        if not same(again[:, 0], right[rows, good], self.dtype):
            return f"a trial on rows of different length {DIFFERS}"
        return None

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self.offset is not None:
            self.offset = self.offset[..., list(rows), :]
        self.types = {name: value[list(rows)] for name, value in self.types.items()}
