"""A decoder on a cache of rows whose prompt is more than text: it reads the prompt once, as `generate` has it read, and goes on with text alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .calling import forward_of
from .inspect import base_of
from .one_by_one import same
from .packing import padded_left
from .prompt import Prompt, Reading
from .row_model import RowModel
from .temperature import with_temperature
from .trials import BLOCK
from .trying import told


_tried: WeakKeyDictionary[Any, dict[frozenset[str], str | None]] = WeakKeyDictionary()


def sees(model: Any) -> bool:
    """Whether a decoder takes more than text."""
    base = base_of(model)
    kinds = getattr(base, "input_modalities", "text")
    return not base.config.is_encoder_decoder and kinds not in ("text", ("text",), ["text"])


def why_not_prompt(model: Any, prompt: Prompt, limit: int) -> str | None:
    """Why a model does not go on from such a prompt in blocks as it does token by token, or None if it does: tried once for each kind of prompt.

    `limit`: as of `RowModel`. Raises: what the model raises at the prompt itself, in `generate` too.
    """
    base = base_of(model)
    known = _tried.setdefault(base, {})
    if prompt.kinds not in known:
        scratch = SeeingModel(None, model, len(prompt.ids), limit)
        scratch.stand_at(prompt.columns(scratch.device))
        scratch.last += BLOCK + 1  # beyond the call's last token
        reading = scratch.read(prompt)
        known[prompt.kinds] = told(base, "its prompt", lambda: scratch.trial(prompt, reading))
    return known[prompt.kinds]


class SeeingModel(RowModel):
    """A `RowModel` that has read a `Prompt`: rounds begin at each row's last token, which must be text.

    Positions behind the prompt are each row's own where pictures take fewer of them than tokens, as Qwen-VL's. The first `feed` raises `ValueError`
    for a model that does not go on from such a prompt in blocks as it does token by token.
    """

    def __init__(self, prompt: Prompt | None, model: Any, rows: int, limit: int, vocabulary: int | None = None):
        """Take `RowModel`'s arguments after `prompt`, which has as many rows; None where a filled cache is adopted."""
        super().__init__(model, rows, limit, vocabulary)
        if self.rope is not None:
            if limit > self.rope.changes_after:
                raise ValueError(
                    f"{type(base_of(model)).__name__} has RoPE that changes beyond {self.rope.changes_after} tokens, and a prompt that is more than "
                    f"text may come to {limit}: ask for fewer tokens, or leave lossy_policy out"
                )
            self.rope, self.run = None, with_temperature(forward_of(model, base_of(model)), base_of(model))
        self.needs_prefill, self.packs = True, False
        self.prompt = prompt
        if prompt is not None:
            self.stand_at(prompt.columns(self.device))
        self.offset: torch.Tensor | None = None  # (…, B, 1): of each row's places, behind the number of its tokens
        self.each: dict[str, torch.Tensor] = {}  # (B, 1): what each token of a row is given beside its id
        self.run = partial(self._seeing, self.run)

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        if self.prompt is None:
            return super().feed(tokens, counts, keep)
        prompt, self.prompt = self.prompt, None
        reason = why_not_prompt(self.model, prompt, self.cache.limit)
        if reason is not None:
            raise ValueError(
                f"{type(base_of(self.model)).__name__} cannot go on in blocks from this prompt ({reason}): leave lossy_policy out"
            )
        logits = self.read(prompt).logits
        return logits[:, None][:, :0] if keep == 0 else super().feed(tokens, counts, keep)

    def _seeing(self, run: Callable[..., Any], position_ids: torch.Tensor, **inputs: Any) -> Any:
        if self.offset is not None:
            position_ids = position_ids + self.offset
        each = {name: value.expand(-1, inputs["input_ids"].shape[1]) for name, value in self.each.items()}
        return run(position_ids=position_ids, **inputs, **each)

    def read(self, prompt: Prompt) -> Reading:
        """Read the prompt, and hold what was read."""
        width = prompt.ids.shape[1] - self.facts.keeps_states  # a state cannot be rolled back into the prompt
        mask = None if prompt.mask is None else prompt.mask[:, :width]
        with padded_left(mask):
            reading = Reading(self.model, prompt, width)
        self.adopt(reading.cache, mask)
        if self.facts.keeps_states:
            assert self.cache.history is not None
            self.cache.history.prompts = [length + 1 for length in self.lengths]
        else:
            self.rollback([length - 1 for length in self.lengths])
        offset, self.each = reading.behind()
        self.offset = offset if offset is None else offset.expand(*offset.shape[:-2], len(self.lengths), 1)
        self.each = {name: value.expand(len(self.lengths), 1) for name, value in self.each.items()}
        return reading

    def trial(self, prompt: Prompt, reading: Reading) -> str | None:
        """Run a block behind what was read, of which rows keep different numbers, beside one token at a time; None if all logits are the same."""
        start, rows = list(self.lengths), range(len(self.lengths))
        tokens = [prompt.ids[:, -1:].to(self.device)]
        wanted = [reading.step() if self.facts.keeps_states else reading.logits]
        for _ in range(BLOCK):
            tokens.append(wanted[-1].argmax(dim=-1, keepdim=True))
            wanted.append(reading.step(tokens[-1]))
        block, right = torch.cat(tokens, dim=1), torch.stack(wanted, dim=1)  # (B, 1 + BLOCK), (B, 1 + BLOCK, V)
        got = self.feed(block, [BLOCK + 1] * len(start), keep=BLOCK + 1)
        if not same(got, right, self.dtype):
            return "a trial on a block did not give what it gives one token at a time"
        kept = [1 + b % BLOCK for b in rows]
        self.rollback([a + n for a, n in zip(start, kept, strict=True)])
        again = self.feed(block[rows, kept][:, None], [1] * len(start), keep=1)
        if not same(again[:, 0], right[rows, kept], self.dtype):
            return "a trial on rows of different length did not give what it gives one token at a time"
        return None

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        if self.offset is not None:
            self.offset = self.offset[..., list(rows), :]
        self.each = {name: value[list(rows)] for name, value in self.each.items()}
