"""A block-diffusion network on the target's hidden states, as a model on a cache of rows that says one token after the other."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .dflash import DFlashNetwork
from .quirks.rope import ChangingRope
from .row_cache import RowCache


BY_ROW = "lengths", "known", "_begins"  # lists with an entry for each row


class BlockModel:
    """`DFlashNetwork` with the verbs of a `RowModel`, any number of rows.

    The first `feed` of a round fills a block in, and each `feed` says the logits of the block's next place, whatever token it is given: what a
    place is like does not depend on what is drawn at the one before. The cache holds what the target's states say of the text (`learn`);
    a block's own keys and values are written behind and forgotten.
    """

    needs_prefill = outlives_call = False
    rope: ChangingRope | None = None

    def __init__(
        self, network: DFlashNetwork, embedding: torch.nn.Module, head: torch.nn.Module, rows: int, limit: int, vocabulary: int,
        begins: Sequence[int] | None = None,
    ):  # fmt: skip
        """`embedding`, `head`: the target's, or the network's own. `limit`: the most tokens that a row can come to. `vocabulary`: the target's.

        `begins`: as of `PairsModel`.
        """
        self.network, self.embedding, self.head, self.vocabulary = network, embedding, head, vocabulary
        self.device, self.dtype = network.device, network.dtype
        self.cache = RowCache(len(network.layers), limit + network.config.block)
        self.lengths = [0] * rows
        self._begins = list(begins or [0] * rows)
        self.known = list(self._begins)  # tokens of each row behind which the target gave no state
        self._block: torch.Tensor | None = None  # logits of the places of a block, (B, drafts, V)
        self.said = 0  # places of it whose logits were asked for

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Return logits after the last token of each row alone, (B, 1, V)."""
        if self._block is None:
            last = torch.tensor(counts, device=tokens.device).clamp(min=1) - 1
            self._block = self._filled_in(tokens.gather(1, last[:, None]).to(self.device))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.said += 1
        place = self._block[:, self.said - 1 : self.said]
        return place if keep == 1 else place.expand(-1, tokens.shape[1], -1)

    def _filled_in(self, last: torch.Tensor) -> torch.Tensor:
        """The logits of a block behind `last` (B, 1)."""
        config = self.network.config
        tokens = torch.nn.functional.pad(last, (0, config.block - 1), value=config.mask)
        slots = self.cache.plan(self._held(), config.block, self.device)
        ends = torch.tensor(self._held(), device=self.device) + config.block
        mask = torch.arange(self.cache.visible, device=self.device) < ends[:, None, None, None]
        hidden = self.network(self.embedding(tokens), slots, mask, self.cache)[:, config.first :]
        logits = self.head(hidden if self.head is self.network.lm_head else hidden.to(_dtype_of(self.head, hidden)))
        if not config.reduced:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        out[..., self.network.kept] = logits
        return out

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        """The target's states (B, Q, layers · target width) of the tokens behind those known, of which row b's are right up to token `ends[b]`."""
        width = max(end - known for end, known in zip(ends, self.known, strict=True))
        if width > 0:
            slots = self.cache.plan(self._held(), width, self.device)
            self.network.remember(states[:, :width].to(self.device), slots, self.cache)
            self.known = [max(pair) for pair in zip(ends, self.known, strict=True)]

    def _held(self) -> list[int]:
        """Tokens of each row in the cache."""
        return [known - begin for known, begin in zip(self.known, self._begins, strict=True)]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Go back to `lengths` cached tokens of each row, and forget the round's block."""
        self.lengths, self._block, self.said = list(lengths), None, 0

    def mark(self) -> Any:
        """What `back_to` is given."""
        return list(self.lengths), self._block, self.said

    def back_to(self, mark: Any) -> None:
        """Forget what was fed since `mark`, within a round."""
        self.lengths, self._block, self.said = mark

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(torch.tensor(rows, dtype=torch.long, device=self.device))
        for name in BY_ROW:
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    def together(self) -> "BlockModel":
        """A model whose first row is the only one of this; others come by `take`. Its storage is copied."""
        out = copy.copy(self)
        out.cache = self.cache.like(self.cache.limit)
        for name in BY_ROW:
            setattr(out, name, [])
        out.take(0, self)
        return out

    def take(self, b: int, other: "BlockModel") -> None:
        """Row b holds from now on what the only row of `other` holds, between two rounds; b may be one more than there are."""
        self.cache.take(b, other.cache, other._held()[0], max(len(self.lengths), b + 1))
        for name in BY_ROW:
            getattr(self, name)[b:] = [*getattr(other, name), *getattr(self, name)[b + 1 :]]

    def export(self, rows: int, mask: Any) -> None:
        """There is no cache that Transformers could go on with."""


def _dtype_of(head: torch.nn.Module, hidden: torch.Tensor) -> torch.dtype:
    """What a head reads; an int8 one reads float32."""
    weight = getattr(head, "weight", None)
    return weight.dtype if isinstance(weight, torch.Tensor) and weight.is_floating_point() else hidden.dtype
