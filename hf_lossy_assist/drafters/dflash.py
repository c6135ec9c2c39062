"""DFlash: a network on the target's hidden states that drafts a block of tokens in one forward (huggingface.co/papers/2602.06036).

DSpark (2607.05147) and DFlash 2 are the same with a correction of each position by the token before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from ..batch.rows import Rows
from ..models.introspection import tokens_known, vocabulary_of
from ..uploads import on_device
from .compiled_networks import DFlashBlock, memory_dtype
from .hidden_state import HiddenStateDrafter
from .networks.base import HiddenStateModel
from .networks.dflash2_network import DFlash2Network
from .networks.dflash_network import DFlashNetwork
from .networks.dspark_network import DSparkNetwork


class DFlashModel(HiddenStateModel):
    """`DFlashNetwork` on a row cache.

    The first `feed` of a round fills in a block, and each `feed` returns the logits of the block's next position: DFlash's whatever token it is
    fed, since a block is filled in before its tokens are drawn; DSpark's and DFlash 2's corrected by that token. The cache holds the target's states of the text
    as keys and values (`learn`); those of a block are written after them and dropped.
    """

    network: DFlashNetwork
    reads_tokens, in_blocks = False, True

    def prepare(self, rows: int) -> None:
        self.lengths, self.longest = [0] * rows, self.network.config.drafts
        self._block: tuple[torch.Tensor, ...] | None = (
            None  # what the head reads of a block (B, drafts, H), and its logits
        )
        self._place = 0  # how many of its positions were returned
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # of the last: what the head read, the token before
        )
        self._state: torch.Tensor | None = None  # see `DFlashNetwork.correct`
        self._filled: torch.Tensor | None = None  # the block of the next compiled round, see `DFlashBlock`

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Return logits after the last token of each row only, (B, 1, V)."""
        last = tokens
        if tokens.shape[1] > 1:
            last = tokens.gather(1, on_device(counts, tokens.device).clamp(min=1)[:, None] - 1)
        last = last.to(self.device)
        if self._block is None:
            hidden = self._fill_block(last)
            self._block = hidden, self.head(hidden)
        hidden, logits = (part[:, self._place] for part in self._block)
        self._latest = hidden, last[:, 0]
        logits, self._state = self.network.correct(logits, *self._latest, self._state)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._place += 1
        place = self.over_target(logits)[:, None]
        return place if keep == 1 else place.expand(-1, tokens.shape[1], -1)

    def confidence(self) -> torch.Tensor:
        assert isinstance(self.network, DSparkNetwork) and self._latest is not None
        return self.network.confidence(*self._latest)

    def _fill_block(self, last: torch.Tensor) -> torch.Tensor:
        """Return a block after `last` (B, 1) as the head reads it, (B, drafts, H)."""
        config, cached = self.network.config, self.cached_tokens()
        tokens = torch.nn.functional.pad(last, (0, config.block - 1), value=config.mask)
        slots = self.cache.plan(cached, config.block, self.device)
        hidden: torch.Tensor = self.network(self.embedding(tokens), slots, self.cache.visible, self.cache)
        hidden = hidden[:, config.first :]
        return hidden.to(memory_dtype(self.network, self.head))

    def state_columns(self, counts: list[int]) -> torch.Tensor | int:
        return self.network.config.first + self._place - 1

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        width = max(end - known for end, known in zip(ends, self.known, strict=True))
        if width > 0:
            slots = self.cache.plan(self.cached_tokens(), width, self.device)
            self.network.remember(states[:, :width].to(self.device), slots, self.cache)
            self.known = [max(pair) for pair in zip(ends, self.known, strict=True)]

    @property
    def traced(self) -> DFlashBlock:
        return DFlashBlock(
            self.network, self.embedding, self.head, self._target_ids, self.static_cache, self.vocabulary
        )

    def memory(self, rows: Rows) -> torch.Tensor:
        if self._filled is None:
            self._filled = self._fill_block(rows.uncached_tokens(rows.cached_lengths())[0].to(self.device))
        return self._filled

    def follow(self, lengths: Sequence[int], memory: torch.Tensor) -> None:
        self.rollback(lengths)
        self.known, self._filled = list(lengths), memory

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._filled = None

    def rollback(self, lengths: Sequence[int]) -> None:
        """Roll back to `lengths` cached tokens of each row, and drop the round's block."""
        self.lengths, self._block, self._place, self._state, self._filled = list(lengths), None, 0, None, None


@dataclass(frozen=True, eq=False)
class DFlashDrafter(HiddenStateDrafter):
    """A trained DFlash network, which drafts up to `network.config.drafts` tokens a round.

    Args: see `HiddenStateDrafter`.
    """

    network: DFlashNetwork
    kind: ClassVar[str] = "a DFlash drafter"
    model_type: ClassVar[str] = "dflash"
    networks: ClassVar[tuple[type, ...]] = (DFlashNetwork,)
    model_class: ClassVar[type[HiddenStateModel]] = DFlashModel

    def check_tokens(self, base: PreTrainedModel) -> None:
        config, size = self.network.config, vocabulary_of(base)
        known = tokens_known(base) if self.network.embed_tokens is None else config.layer.vocab_size
        highest = -1 if config.draft_vocab_size is None else int(self.network.target_ids.max())
        if config.mask >= known or highest >= size:
            raise ValueError(
                f"{self.name} knows token ids that the target of {size} tokens has not: it is another target's"
            )


@dataclass(frozen=True, eq=False)
class DFlash2Drafter(DFlashDrafter):
    """A trained DFlash 2 network: a DFlash drafter whose tokens depend on those before them in the block, each one of a few likely ones.

    Args: see `HiddenStateDrafter`.
    """

    network: DFlash2Network
    kind: ClassVar[str] = "a DFlash 2 drafter"
    model_type: ClassVar[str] = "dflash2"
    networks: ClassVar[tuple[type, ...]] = (DFlash2Network,)

    def check_tokens(self, base: PreTrainedModel) -> None:
        super().check_tokens(base)
        refuse_another_table(self, "a selector", base)


@dataclass(frozen=True, eq=False)
class DSparkDrafter(DFlashDrafter):
    """A trained DSpark network: a DFlash drafter whose tokens depend on the tokens before them in the block.

    `Confidence(threshold, reads="head")` stops by its confidence head. Args: see `HiddenStateDrafter`.
    """

    network: DSparkNetwork
    kind: ClassVar[str] = "a DSpark drafter"
    model_type: ClassVar[str] = "dspark"
    networks: ClassVar[tuple[type, ...]] = (DSparkNetwork,)

    @property
    def gives_confidence(self) -> bool:
        return self.network.config.confidence

    def check_tokens(self, base: PreTrainedModel) -> None:
        super().check_tokens(base)
        if self.network.markov_head is not None:
            refuse_another_table(self, "a Markov head", base)


def refuse_another_table(drafter: DFlashDrafter, what: str, base: PreTrainedModel) -> None:
    """Refuse a target whose tokens are not those of `what`, a table over the target's tokens. Raises: `ValueError`, one line."""
    size, read, written = drafter.network.config.layer.vocab_size, tokens_known(base), vocabulary_of(base)
    if size < read or (drafter.network.lm_head is None and size != written):
        raise ValueError(
            f"{drafter.name} has {what} of {size} tokens, and the target reads {read} and writes {written}: it is another target's"
        )
