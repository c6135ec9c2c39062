"""A prompt that is more than text, such as one with images: a model reads it at once, with all that `generate` hands it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache_name import CACHE
from .columns import Columns
from .growing import MASK, POSITIONS, REPEATED, GrowingInputs
from .inspect import base_of, device_of


@dataclass(frozen=True)
class Prompt:
    """The prompts of a call.

    Args:
        ids: (B, width) int64, hidden tokens too.
        given: the model's other inputs as `generate` prepared them, without a cache.
    """

    ids: torch.Tensor
    given: Mapping[str, Any]

    @property
    def kinds(self) -> frozenset[str]:
        """The names of what is given, and whether there are several rows and tokens hidden between others: what a trial of one such prompt says of
        others.
        """
        names = {name for name, value in self.given.items() if value is not None and not isinstance(value, Mapping)}
        for name, value in self.given.items():  # what was encoded of each kind of input
            if isinstance(value, Mapping):
                names |= {f"{name}: {kind}" for kind, encoded in value.items() if encoded is not None}
        if len(self.ids) > 1:
            names.add("rows")
        if self.mask is not None and bool((self.mask.ne(0).int().diff(dim=1) < 0).any()):
            names.add("holes")
        return frozenset(names)

    @property
    def mask(self) -> torch.Tensor | None:
        """(B, width), 0 where a token is hidden."""
        found: torch.Tensor | None = self.given.get(MASK)
        return found

    def columns(self, device: torch.device) -> Columns | None:
        """Where the tokens stand that are not hidden; None: nothing is."""
        if self.mask is None or bool(self.mask.all()):
            return None
        return Columns([row.nonzero()[:, 0] for row in self.mask], self.ids.shape[1], device)


class Reading:
    """A prompt that a model reads, and goes on from, as `generate` has it do: on a cache of Transformers' own, padded rows side by side."""

    def __init__(self, model: Any, prompt: Prompt, width: int):
        """Reads the first `width` places of the prompt's, which are all or all but one."""
        self.model, self.base = model, base_of(model)
        config = self.base.config.get_text_config(decoder=True)
        device = device_of(self.base)
        self.cache: Cache = DynamicCache(config=config)
        # A window keeps no more than the next token needs; here the last one is read again.
        self.cache.layers = [
            DynamicLayer() if type(its) is DynamicSlidingWindowLayer else its for its in self.cache.layers
        ]
        self.ids, self.given = prompt.ids.to(device), dict(prompt.given)
        self.given |= {"use_cache": True}
        if "logits_to_keep" in self.given:
            self.given["logits_to_keep"] = 1
        self.growing = GrowingInputs.taken_from(self.given, False, device)
        self.logits = self._run(width, is_first_iteration=True)

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """One more token of each row, `tokens` (B, 1), or the prompt's own; returns the logits behind it, (B, V)."""
        if tokens is not None:
            self.ids = torch.cat([self.ids, tokens.to(self.ids.device)], dim=1)
        return self._run(int(self.cache.get_seq_length()) + 1, next_sequence_length=1)

    def _run(self, end: int, **how: Any) -> torch.Tensor:
        out = self.model(**self._inputs(end, **how), return_dict=True)
        self.cache = out[CACHE]
        kept = {int(its.get_seq_length()) for its in self.cache.layers if getattr(its, "keys", None) is not None}
        if kept - {end}:
            raise ValueError(
                f"{type(self.base).__name__} keeps {', '.join(map(str, sorted(kept)))} places in its cache for a prompt of {end} tokens, and a round "
                "can only go on from a place for each: leave lossy_policy out"
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _inputs(self, end: int, **how: Any) -> dict[str, Any]:
        given = self.given | {CACHE: self.cache} | self.growing.up_to(end) | how
        inputs: dict[str, Any] = self.base.prepare_inputs_for_generation(self.ids[:, :end], **given)
        return inputs

    def behind(self) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """What the token behind the prompt is given: its place less the tokens before it, (…, B, 1) or None for zeros, and types, (B, 1) each."""
        width = self.ids.shape[1]
        ids = torch.nn.functional.pad(self.ids, (0, 1))
        given = self.given | {CACHE: self.cache} | self.growing.up_to(width + 1)
        inputs = self.base.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
        types = {name: inputs[name] for name in REPEATED if inputs.get(name) is not None}
        places = inputs.get(POSITIONS)
        if places is None:
            return None, types
        mask = self.growing.mask
        counts = torch.full((len(ids),), width, device=ids.device) if mask is None else mask.ne(0).sum(dim=1)
        offset = places[..., -1:] - counts[:, None].to(places.device)  # (…, B, 1)
        return (offset if bool(offset.any()) else None), types
