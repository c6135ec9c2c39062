"""Draft networks on the target's hidden states in a compiled round: the `DraftBlock` of each, made of tensors only.

Their shapes never depend on what was accepted. After each round they learn the states of all its tokens; those of rejected tokens are overwritten
in the next round. A draft begins with the memory (B, …), a result of the previous round.
"""

from typing import NamedTuple

import torch

from ..models.compiled.static_cache import StaticRowCache
from .networks.base import spread
from .networks.dflash_network import DFlashNetwork
from .networks.eagle_network import Eagle3Network
from .networks.sight import masks_of


class EagleBlock(NamedTuple):
    """An EAGLE network and its cache. The memory (B, 1, H) is the state of the token before the next input: fused, or the network's output."""

    model: Eagle3Network
    embedding: torch.nn.Module
    head: torch.nn.Module
    ids: torch.Tensor | None  # in the target's vocabulary, if the network can propose only a part of it
    cache: StaticRowCache
    vocabulary: int  # size of the target's

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, number: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftBlock`."""
        output, normed = self.run(inputs[:, -1:], memory, cached + number - 1, cached[:, None] - 1)
        return spread(self.head(normed[:, -1]), self.ids, self.vocabulary), output

    def learn(
        self,
        tokens: torch.Tensor,
        cached: torch.Tensor,
        accepted: torch.Tensor,
        last: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """See `DraftBlock`. The next step feeds the last token's pair."""
        fused = self.model.fuse(states)
        self.run(tokens, fused[:, :-1], cached)
        return fused.gather(1, accepted[:, None, None].expand(-1, 1, fused.shape[2]))

    def run(
        self, tokens: torch.Tensor, states: torch.Tensor, starts: torch.Tensor, begins: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed pairs of `tokens` (B, Q) and `states` (B, Q, H) from slot `starts` (B,) on; return the network's outputs.

        `begins` (B, 1): the last pair with a state of the target's; None: all have one.
        """
        slots = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.cache.plan_static(slots)
        masks = masks_of(
            self.model.sights, slots, slots if begins is None else begins, self.cache.capacity, states.dtype
        )
        found: tuple[torch.Tensor, torch.Tensor] = self.model(self.embedding(tokens), states, slots, masks, self.cache)
        self.cache.forget_plan()
        return found


class ParallelEagleBlock(NamedTuple):
    """A P-EAGLE network. The memory (B, 1 + drafts, H) is the fused state before the last token, and the next round's draft as the head reads it."""

    eagle: EagleBlock
    masked: torch.Tensor  # the state (1, 1, H) and the token of masked pairs, and the number of a draft's tokens
    mask: int
    drafts: int

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, number: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftBlock`. Steps beyond the draft are not used by any row."""
        hidden = memory.index_select(1, 1 + number.clamp(max=self.drafts - 1)[None])[:, 0]
        return spread(self.eagle.head(hidden), self.eagle.ids, self.eagle.vocabulary), memory

    def learn(
        self,
        tokens: torch.Tensor,
        cached: torch.Tensor,
        accepted: torch.Tensor,
        last: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """See `DraftBlock`."""
        state, more, start = (
            self.eagle.learn(tokens, cached, accepted, last, states),
            self.drafts - 1,
            cached + accepted,
        )
        given = torch.cat([state, self.masked.expand(len(state), more, -1)], dim=1)
        last = torch.nn.functional.pad(last, (0, more), value=self.mask)
        return torch.cat([state, self.eagle.run(last, given, start, start[:, None])[1]], dim=1)


class DFlashBlock(NamedTuple):
    """A DFlash network and its cache. The memory (B, drafts, H) is a filled-in block after the last token, as the head reads it."""

    model: DFlashNetwork
    embedding: torch.nn.Module
    head: torch.nn.Module
    ids: torch.Tensor | None  # this and the others: see `EagleBlock`
    cache: StaticRowCache
    vocabulary: int

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, number: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftBlock`. Steps beyond the block are not used by any row."""
        hidden = memory.index_select(1, number.clamp(max=memory.shape[1] - 1)[None])[:, 0]
        logits, _ = self.model.correct(self.head(hidden), hidden, inputs[:, -1], None)
        return spread(logits, self.ids, self.vocabulary), memory

    def learn(
        self,
        tokens: torch.Tensor,
        cached: torch.Tensor,
        accepted: torch.Tensor,
        last: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """See `DraftBlock`."""
        config, device = self.model.config, tokens.device
        slots = cached[:, None] + torch.arange(states.shape[1], device=device)
        self.cache.plan_static(slots)
        self.model.remember(states, slots, self.cache)
        slots = (cached + accepted + 1)[:, None] + torch.arange(config.block, device=device)
        self.cache.plan_static(slots)
        block = torch.nn.functional.pad(last, (0, config.block - 1), value=config.mask)
        hidden = self.model(self.embedding(block), slots, self.cache.capacity, self.cache)[:, config.first :]
        self.cache.forget_plan()
        return hidden.to(memory_dtype(self.model, self.head))


def memory_dtype(network: DFlashNetwork, head: torch.nn.Module) -> torch.dtype:
    """Return the dtype that a DFlash network's head reads: the target's if the head is the target's and not in int8."""
    weight = getattr(head, "weight", None)
    if network.lm_head is None and isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.dtype
    return network.dtype
