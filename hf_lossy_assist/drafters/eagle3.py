"""EAGLE: one or more decoder layers on the target's own hidden states, drafting token by token (EAGLE-3: huggingface.co/papers/2503.01840)."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..models.eagle1 import Eagle1Network
from ..models.eagle3 import Eagle3Network
from ..models.identity import ModelIdentity
from ..models.inspect import base_of, blocks_of, vocabulary_of
from ..models.int8 import linears_in_int8
from ..models.layer_states import LayerStates
from ..models.pairs_model import PairsModel
from ..validation import shown
from .base import DraftContext
from .states import Proposal, StatesDrafter, StatesRun


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(StatesDrafter):
    """A trained network of EAGLE-3, or of EAGLE-1 and 2. Chains alone: one token follows another; no trees.

    Args:
        network: what drafts. source: where it was loaded from. proposal: what its files suggest; `proposal.policy` is never used unasked.
    """

    network: Eagle3Network | Eagle1Network
    source: str | None = None
    proposal: Proposal = Proposal()
    kind: ClassVar[str] = "an EAGLE-3 drafter"

    def __post_init__(self) -> None:
        if not isinstance(self.network, Eagle3Network | Eagle1Network):
            raise TypeError(
                f"Eagle3Drafter.network: expected an Eagle3Network, got {shown(self.network)}: load one with load_drafter"
            )

    @property
    def identity(self) -> ModelIdentity:
        """What profiles and heads record of a draft."""
        layer = self.network.config.layer
        name = (
            "EAGLE-3 drafter"
            if self.source is None
            else Path(self.source).name
            if Path(self.source).is_dir()
            else self.source
        )
        return ModelIdentity(name, None, "eagle3", layer.hidden_size, layer.num_hidden_layers, layer.vocab_size)

    def check(self, target: Any) -> None:
        """Refuse a target that it was not made for, as far as its sizes say so. Raises: `ValueError`."""
        config, base = self.network.config, base_of(target)
        text = base.config.get_text_config(decoder=True)
        name, width, size = self.source or "this EAGLE-3 drafter", text.hidden_size, vocabulary_of(target)
        if config.target_hidden_size != width:
            raise ValueError(
                f"{name} reads states of {config.target_hidden_size} numbers, and the target's have {width}: it is another target's"
            )
        highest = int(self.network.kept.max()) + 1 if config.reduced else config.draft_vocab_size
        if highest > size or config.layer.vocab_size > base.get_input_embeddings().weight.shape[0]:
            raise ValueError(
                f"{name} knows token ids up to {max(highest, config.layer.vocab_size)}, and the target has {size}: it is another target's"
            )
        if (
            self.network.embed_tokens is None
            and config.layer.hidden_size != base.get_input_embeddings().weight.shape[1]
        ):
            raise ValueError(
                f"{name} has no embeddings, and the target's are {base.get_input_embeddings().weight.shape[1]} wide, not {config.layer.hidden_size}"
            )
        states_of(target, self.network)

    def int8(self) -> "Eagle3Drafter":
        """A copy whose linear layers compute in int8, on the CPU: a fraction of the bytes that each drafted token reads."""
        return replace(self, network=linears_in_int8(copy.deepcopy(self.network).float().cpu()))

    def start(self, context: DraftContext) -> StatesRun:
        self.check(context.target)
        self.prepare(context, self.network)
        rows = context.rows
        embedding = self.network.embed_tokens or base_of(context.target).get_input_embeddings()
        head = base_of(context.target).get_output_embeddings() if self.network.lm_head is None else None
        model = PairsModel(
            self.network, embedding, len(rows.index), rows.max_length, context.vocabulary, head, context.held
        )
        return StatesRun(model, states_of(context.target, self.network), context)


def states_of(target: Any, network: Eagle3Network | Eagle1Network) -> LayerStates:
    """What keeps the states of the target that a network reads. Raises: `ValueError` where the target has no such layers."""
    blocks = blocks_of(base_of(target)) or ()
    return LayerStates(target, network.config.layers_of(len(blocks)))
