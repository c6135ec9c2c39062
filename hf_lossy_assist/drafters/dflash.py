"""DFlash: a network on the target's own hidden states that drafts a block of tokens in one forward (huggingface.co/papers/2602.06036)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.block_model import BlockModel
from ..models.dflash import DFlashNetwork
from ..models.identity import ModelIdentity
from ..models.inspect import base_of, tokens_known, vocabulary_of
from ..models.int8 import linears_in_int8
from ..models.layer_states import LayerStates
from ..round import Draft
from ..validation import shown
from .base import DraftContext
from .states import Proposal, StatesDrafter, StatesRun


@dataclass(frozen=True, eq=False)
class DFlashDrafter(StatesDrafter):
    """A trained network, which drafts up to `network.config.drafts` tokens a round.

    Args: as of `Eagle3Drafter`.
    """

    network: DFlashNetwork
    source: str | None = None
    proposal: Proposal = Proposal()
    kind: ClassVar[str] = "a DFlash drafter"

    def __post_init__(self) -> None:
        if not isinstance(self.network, DFlashNetwork):
            raise TypeError(
                f"DFlashDrafter.network: expected a DFlashNetwork, got {shown(self.network)}: load one with load_drafter"
            )

    @property
    def identity(self) -> ModelIdentity:
        """What profiles and heads record of a draft."""
        layer = self.network.config.layer
        name = (
            "DFlash drafter"
            if self.source is None
            else Path(self.source).name
            if Path(self.source).is_dir()
            else self.source
        )
        return ModelIdentity(name, None, "dflash", layer.hidden_size, layer.num_hidden_layers, layer.vocab_size)

    def check(self, target: Any) -> None:
        """Refuse a target that it was not made for, as far as its sizes say so. Raises: `ValueError`."""
        config, base, name = self.network.config, base_of(target), self.source or "this DFlash drafter"
        width, size = base.config.get_text_config(decoder=True).hidden_size, vocabulary_of(target)
        if width not in (config.target_hidden_size,) or (
            self.network.lm_head is None and width != config.layer.hidden_size
        ):
            raise ValueError(
                f"{name} reads states of {config.target_hidden_size} numbers, and the target's have {width}: it is another target's"
            )
        known = tokens_known(base) if self.network.embed_tokens is None else config.layer.vocab_size
        if config.mask >= known or (config.draft_vocab_size is not None and int(self.network.kept.max()) >= size):
            raise ValueError(
                f"{name} knows token ids that the target of {size} tokens has not: it is another target's"
            )
        LayerStates(target, config.target_layers)

    def int8(self) -> "DFlashDrafter":
        """A copy whose linear layers compute in int8, on the CPU."""
        return replace(self, network=linears_in_int8(copy.deepcopy(self.network).float().cpu()))

    def start(self, context: DraftContext) -> "DFlashRun":
        self.check(context.target)
        self.prepare(context, self.network)
        base, rows, network = base_of(context.target), context.rows, self.network
        model = BlockModel(
            network, network.embed_tokens or base.get_input_embeddings(), network.lm_head or base.get_output_embeddings(),
            len(rows.index), rows.max_length, context.vocabulary, context.held,
        )  # fmt: skip
        return DFlashRun(model, LayerStates(context.target, network.config.target_layers), context)


class DFlashRun(StatesRun):
    """A DFlash network at work in one call."""

    model: BlockModel

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        most = self.model.network.config.drafts
        return super().propose(rows, [min(limit, most) for limit in limits], randomness)

    def _behind(self, rows: Rows) -> tuple[torch.Tensor, list[int]]:
        return rows.after(rows.held())  # a block begins with the last token, and reads no other
