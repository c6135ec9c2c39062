"""EAGLE: one or more decoder layers on the target's own hidden states, drafting token by token (EAGLE-3: huggingface.co/papers/2503.01840)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..models.eagle1 import Eagle1Network
from ..models.eagle3 import Eagle3Network
from ..models.introspection import base_of, blocks_of, vocabulary_of
from ..models.layer_states import LayerStates
from ..models.pairs_model import PairsModel
from .base import DraftContext
from .states import StatesDrafter
from .states_run import StatesRun


PLACES = 5  # tokens of a draft that data for heads, judges and SVIP's threshold are of, the first to the fifth alike


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(StatesDrafter):
    """A trained network of EAGLE-3, or of EAGLE-1 and 2. Chains alone: one token follows another; no trees.

    Args: as of `StatesDrafter`.
    """

    network: Eagle3Network | Eagle1Network
    kind: ClassVar[str] = "an EAGLE-3 drafter"
    model_type: ClassVar[str] = "eagle3"
    networks: ClassVar[tuple[type, ...]] = (Eagle3Network, Eagle1Network)

    def check(self, target: Any) -> None:
        """Refuse a target that it was not made for, as far as its sizes say so. Raises: `ValueError`."""
        config, base, size = self.network.config, base_of(target), vocabulary_of(target)
        self.check_widths(base)
        highest = int(self.network.kept.max()) + 1 if config.reduced else config.draft_vocab_size
        if highest > size or config.layer.vocab_size > base.get_input_embeddings().weight.shape[0]:
            raise ValueError(
                f"{self.name} knows token ids up to {max(highest, config.layer.vocab_size)}, and the target has {size}: it is another target's"
            )
        states_of(target, self.network)

    def start(self, context: DraftContext) -> StatesRun:
        self.check(context.target)
        rows = context.rows
        model = self.cached(context.target, len(rows.index), rows.max_length, context.vocabulary, context.held)
        return StatesRun(model, states_of(context.target, self.network), context)

    def cached(
        self, target: Any, rows: int, limit: int, vocabulary: int, begins: Sequence[int] | None = None
    ) -> PairsModel:
        """The network, where the target is, on a cache of rows; arguments as of `PairsModel`."""
        base, network = base_of(target), self.beside(target).network
        embedding = network.embed_tokens or base.get_input_embeddings()
        head = base.get_output_embeddings() if network.lm_head is None else None
        return PairsModel(network, embedding, rows, limit, vocabulary, head, begins)

    @torch.no_grad()
    def logits_along(
        self, target: Any, ids: torch.Tensor, states: torch.Tensor, keep: int, places: int = 1
    ) -> torch.Tensor:
        """What it says of the next token at the last `keep` places of a text `ids` (T,), (keep, V).

        At the first of them as the first token of a draft, from the target's states, at the next as the second, from its own behind it, …; every
        `places`-th is again a first. `states` (T − 1, layers · H): the target's of all tokens but the last, as `states_of` keeps them. keep < T.
        """
        model, count = self.cached(target, 1, len(ids) + 1, vocabulary_of(target)), len(ids)
        if places == 1:
            model.learn(states[None], [count - 1])
            return model.feed(ids[None, 1:], [count - 1], keep=keep)[0]
        found: list[torch.Tensor] = []
        for first in range(count - keep, count, places):
            model.rollback(model.lengths)
            model.learn(states[None, model.known[0] : first], [first])
            for place in range(first, min(first + places, count)):
                fed = ids[None, model.lengths[0] : place + 1]
                found.append(model.feed(fed, [fed.shape[1]], keep=1)[0])
        return torch.cat(found)


def states_of(target: Any, network: Eagle3Network | Eagle1Network) -> LayerStates:
    """What keeps the states of the target that a network reads. Raises: `ValueError` where the target has no such layers."""
    blocks = blocks_of(base_of(target)) or ()
    return LayerStates(target, network.config.layers_of(len(blocks)))
