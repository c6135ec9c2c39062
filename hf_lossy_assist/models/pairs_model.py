"""A draft network on the target's hidden states, as a model on a cache of rows: it is fed tokens, and finds the states that belong to them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .eagle1 import Eagle1Network
from .eagle3 import Eagle3Network
from .masks import visibility
from .quirks.rope import ChangingRope
from .row_cache import RowCache


BY_ROW = "lengths", "known", "_sound", "_base", "_begins"  # lists with an entry for each row


class PairsModel:
    """`Eagle3Network` or `Eagle1Network` with the verbs of a `RowModel`, any number of rows.

    Pair i is token i + 1 with the state of token i, so the first token of a text has no pair of its own and `lengths` begin at 1. States come from
    the target where it has been (`learn`), else from the network's own output at the pair before; pairs of the second kind are forgotten with
    the next `rollback`, which is where the target's states take their places.
    """

    needs_prefill = outlives_call = False
    rope: ChangingRope | None = None

    def __init__(
        self, network: Eagle3Network | Eagle1Network, embedding: torch.nn.Module, rows: int, limit: int, vocabulary: int,
        head: torch.nn.Module | None = None, begins: Sequence[int] | None = None,
    ):  # fmt: skip
        """`embedding`: of the target's tokens. `limit`: the most tokens that a row can come to. `vocabulary`: of the target's logits.

        `head`: the target's, where the network has none. `begins`: the tokens of each row that the target held before, whose states nobody knows;
        to the network the text begins behind them.
        """
        self.network, self.embedding, self.vocabulary = network, embedding, vocabulary
        self.head: Any = network.lm_head if head is None else head
        self.device, self.dtype = network.device, network.dtype
        width = network.config.layer.hidden_size
        self.cache = RowCache(len(network.layers), limit)
        self._begins = list(begins or [0] * rows)
        self.lengths = [begin + 1 for begin in self._begins]
        self.known = list(self._begins)  # tokens of each row behind which the target gave no state
        self._sound = list(self.lengths)  # of `lengths`, what stands on the target's states alone
        self._base = list(self._begins)  # the token whose state is the first of `_states`
        self._states = torch.empty(rows, 0, width, dtype=self.dtype, device=self.device)
        self._own = self._states.new_zeros(rows, width)
        self._kept = network.kept.to(self.device) if network.config.reduced else None

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Read tokens as `CachedModel.feed` does; logits of tokens that the network cannot propose are −inf."""
        tokens = tokens.to(self.device)
        width = tokens.shape[1]
        starts = [length - 1 for length in self.lengths]
        states = self._states_at(starts, width)
        slots = self.cache.plan(
            [start - begin for start, begin in zip(starts, self._begins, strict=True)], width, self.device
        )
        visible = self.cache.visible
        mask = None
        if width > 1 or len(set(starts)) > 1:
            seen = visibility(slots, visible, None, None)
            mask = torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, torch.finfo(self.dtype).min)
        own, normed = self.network(self.embedding(tokens), states, slots, mask, self.cache)
        last = torch.tensor(counts, device=self.device).clamp(min=1) - 1
        self._own = own[torch.arange(len(counts), device=self.device), last]
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if start + count <= self.known[b]:
                self._sound[b] = start + count + 1
            self.lengths[b] += count
        keep = width if keep is None else keep
        return self._over_target(self.head(normed[:, width - keep :]))

    def _states_at(self, starts: Sequence[int], width: int) -> torch.Tensor:
        """The states of tokens starts[b] … starts[b] + width − 1, (B, width, H); where the target gave none, the network's own."""
        if not self._states.shape[1]:
            return self._own[:, None].expand(-1, width, -1)
        first = torch.tensor(
            [start - base for start, base in zip(starts, self._base, strict=True)], device=self.device
        )
        columns = first[:, None] + torch.arange(width, device=self.device)
        given = self._states.gather(
            1, columns.clamp(0, self._states.shape[1] - 1)[..., None].expand(-1, -1, self._states.shape[2])
        )
        unknown = torch.tensor(
            [start >= known for start, known in zip(starts, self.known, strict=True)], device=self.device
        )
        return torch.where(unknown[:, None, None], self._own[:, None], given)

    def _over_target(self, logits: torch.Tensor) -> torch.Tensor:
        if self._kept is None:
            return logits
        out = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        out[..., self._kept] = logits
        return out

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        """The target's states (B, Q, layers · target width) of the tokens behind those known, of which row b's are right up to token `ends[b]`."""
        fused = self.network.fuse(states.to(self.device))
        base = [min(sound - 1, known) for sound, known in zip(self._sound, self.known, strict=True)]
        width = max(end - start for end, start in zip(ends, base, strict=True))
        places = torch.arange(max(width, 0), device=self.device) + torch.tensor(base, device=self.device)[:, None]
        old, new = (places - torch.tensor(its, device=self.device)[:, None] for its in (self._base, self.known))
        out = self._gathered(fused, new)
        if self._states.shape[1]:
            out = torch.where((new < 0)[..., None], self._gathered(self._states, old), out)
        self._states, self._base = out, base
        self.known = [max(end, known) for end, known in zip(ends, self.known, strict=True)]

    @staticmethod
    def _gathered(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return states.gather(1, columns.clamp(0, states.shape[1] - 1)[..., None].expand(-1, -1, states.shape[2]))

    def rollback(self, lengths: Sequence[int]) -> None:
        """Go back to `lengths` cached tokens of each row, or to where the target's states end, if that is earlier."""
        self.lengths = [min(pair) for pair in zip(lengths, self._sound, strict=True)]
        self._sound = [min(pair) for pair in zip(self.lengths, self._sound, strict=True)]

    def mark(self) -> Any:
        """What `back_to` is given."""
        return list(self.lengths), list(self._sound), self._own

    def back_to(self, mark: Any) -> None:
        """Forget what was fed since `mark`, between two calls of `learn`."""
        self.lengths, self._sound, self._own = mark

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self.cache.select(index)
        self._states, self._own = self._states[index], self._own[index]
        for name in BY_ROW:
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    def together(self) -> "PairsModel":
        """A model whose first row is the only one of this; others come by `take`. Its storage is copied."""
        out = copy.copy(self)
        out.cache, out._states, out._own = self.cache.like(self.cache.limit), self._states[:0], self._own[:0]
        for name in BY_ROW:
            setattr(out, name, [])
        out.take(0, self)
        return out

    def take(self, b: int, other: "PairsModel") -> None:
        """Row b holds from now on what the only row of `other` holds; b may be one more than there are."""
        rows = max(len(self.lengths), b + 1)
        self.cache.take(b, other.cache, other.lengths[0] - 1 - other._begins[0], rows)
        old, new = self._states, other._states
        self._states = old.new_zeros(rows, max(old.shape[1], new.shape[1]), old.shape[2])
        self._states[: len(old), : old.shape[1]] = old
        self._states[b, : new.shape[1]] = new[0]
        self._own = torch.cat([self._own[:b], other._own, self._own[b + 1 :]])
        for name in BY_ROW:
            getattr(self, name)[b:] = [*getattr(other, name), *getattr(self, name)[b + 1 :]]

    def export(self, rows: int, mask: Any) -> None:
        """There is no cache that Transformers could go on with."""
