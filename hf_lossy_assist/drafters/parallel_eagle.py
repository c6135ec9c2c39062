"""P-EAGLE: an EAGLE-3 network that drafts all tokens of a round in one forward (huggingface.co/papers/2602.01469).

After the last pair with a state of the target's it reads pairs of a mask token and a learned state, one for each further token, so the tokens of a
draft do not depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from ..batch.rows import Rows
from ..models.introspection import tokens_known
from ..uploads import on_device
from .compiled_networks import ParallelEagleBlock
from .eagle import Eagle3Drafter, EagleModel
from .networks.base import HiddenStateModel
from .networks.eagle_network import ParallelEagleNetwork


class ParallelEagleModel(EagleModel):
    """`ParallelEagleNetwork` on a row cache. The first `feed` of a round runs all pairs of its draft; each returns the logits of the next token."""

    network: ParallelEagleNetwork
    in_blocks = True

    def prepare(self, rows: int) -> None:
        super().prepare(rows)
        self.longest = self.network.config.drafts
        self._masked = self.network.masked_state()
        self._block: torch.Tensor | None = None  # logits of the round's tokens (B, wanted, draft V)
        self._place = 0  # how many of them were returned
        self._first = [0] * rows  # the column of the first one in the forward
        self._filled: torch.Tensor | None = None  # the memory of the next compiled round

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Return logits after the last token of each row only, (B, 1, V)."""
        if keep == 0:
            return super().feed(tokens, counts, keep)
        if self._block is None:
            self._block = self.head(self._fill_block(tokens.to(self.device), counts))
            self._advance([length - 1 for length in self.lengths], counts)
        else:
            self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._place += 1
        place = self.over_target(self._block[:, self._place - 1 : self._place])
        return place if keep == 1 else place.expand(-1, tokens.shape[1], -1)

    def _fill_block(self, tokens: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Read `tokens` (B, Q), and masked pairs after each row's; return what the head reads of its last pair and of each masked one, (B, wanted, H)."""
        starts, more = [length - 1 for length in self.lengths], self.wanted - 1
        known = [end - start for end, start in zip(self.known, starts, strict=True)]
        columns = torch.arange(tokens.shape[1] + more, device=self.device)
        masked = columns >= on_device([min(pair) for pair in zip(known, counts, strict=True)], self.device)[:, None]
        tokens = torch.nn.functional.pad(tokens, (0, more)).masked_fill(masked, self.network.config.mask)
        states = torch.where(masked[..., None], self._masked, self._states_at(starts, len(columns)))
        _, normed = self._run(tokens, states)
        self._first = [max(count - 1, 0) for count in counts]
        places = on_device(self._first, self.device)[:, None] + columns[: more + 1]
        return normed.gather(1, places[..., None].expand(-1, -1, normed.shape[2]))

    @property
    def traced(self) -> ParallelEagleBlock:
        config = self.network.config
        return ParallelEagleBlock(self.block, self._masked, config.mask, config.drafts)

    @property
    def remembered(self) -> int:
        return 1 + self.network.config.drafts

    def memory(self, rows: Rows) -> torch.Tensor:
        if self._filled is None:
            state, self.wanted = super().memory(rows), self.network.config.drafts
            last = rows.uncached_tokens(self.lengths)[0].to(self.device)
            self._filled = torch.cat([state, self._fill_block(last, [1] * len(last))], dim=1)
        return self._filled

    def follow(self, lengths: Sequence[int], memory: torch.Tensor) -> None:
        super().follow(lengths, memory[:, :1])
        self._block, self._place, self._filled = None, 0, memory

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._filled = None

    def state_columns(self, counts: list[int]) -> torch.Tensor | int:
        return on_device([first + self._place - 1 for first in self._first], self.device)

    def rollback(self, lengths: Sequence[int]) -> None:
        super().rollback(lengths)
        self._block, self._place, self._filled = None, 0, None


@dataclass(frozen=True, eq=False)
class ParallelEagleDrafter(Eagle3Drafter):
    """A trained P-EAGLE network, which drafts up to `network.config.drafts` tokens a round.

    Args: see `HiddenStateDrafter`.
    """

    network: ParallelEagleNetwork
    kind: ClassVar[str] = "a P-EAGLE drafter"
    model_type: ClassVar[str] = "peagle"
    networks: ClassVar[tuple[type, ...]] = (ParallelEagleNetwork,)
    model_class: ClassVar[type[HiddenStateModel]] = ParallelEagleModel
    drafts_each_place: ClassVar[bool] = False

    def check_tokens(self, base: PreTrainedModel) -> None:
        super().check_tokens(base)
        known = tokens_known(base) if self.network.embed_tokens is None else self.network.config.layer.vocab_size
        if self.network.config.mask >= known:
            raise ValueError(
                f"{self.name} has the mask token {self.network.config.mask}, and there are embeddings of {known} tokens: it is another target's"
            )
