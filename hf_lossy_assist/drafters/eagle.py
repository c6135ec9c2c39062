"""EAGLE: one or more decoder layers on the target's hidden states that draft token by token (EAGLE-3: huggingface.co/papers/2503.01840)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from ..models.introspection import vocabulary_of
from .hidden_state import HiddenStateDrafter
from .networks.eagle_network import Eagle3Network


PLACES = 5  # data for heads, judges and SVIP's threshold cover the first to the fifth token of a draft equally


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(HiddenStateDrafter):
    """A trained network of EAGLE-3. It drafts chains only, no trees.

    Args: see `HiddenStateDrafter`.
    """

    network: Eagle3Network
    kind: ClassVar[str] = "an EAGLE-3 drafter"
    model_type: ClassVar[str] = "eagle3"
    networks: ClassVar[tuple[type, ...]] = (Eagle3Network,)
    drafts_each_place: ClassVar[bool] = True

    def check_tokens(self, base: PreTrainedModel) -> None:
        config, size = self.network.config, vocabulary_of(base)
        highest = int(self.network.target_ids.max()) + 1 if config.reduced else config.draft_vocab_size
        if highest > size or config.layer.vocab_size > base.get_input_embeddings().weight.shape[0]:
            raise ValueError(
                f"{self.name} knows token ids up to {max(highest, config.layer.vocab_size)}, and the target has {size}: it is another target's"
            )

    @torch.no_grad()
    def logits_along(
        self, target: PreTrainedModel, ids: torch.Tensor, states: torch.Tensor, keep: int, places: int = 1
    ) -> torch.Tensor:
        """Return the logits for the token after each of the last `keep` positions of a text `ids` (T,), (keep, V). keep < T.

        The first of them is drafted as the first token of a draft, from the target's states, the next as the second, from the network's output, and
        so on; every `places`-th starts a new draft. `states` (T − 1, layers · H): the target's for all tokens but the last, as kept by `hook`.
        """
        model, count = self.make_model(target, 1, len(ids) + 1, vocabulary_of(target)), len(ids)
        if places == 1:
            parts, ids = model.parts, ids.to(model.device)
            parts.cache.reserve(count)
            fused = self.beside(target).network.fuse(states.to(model.device))
            _, normed = self.beside(target).network.run(parts, ids[None, 1:], fused[None], ids.new_zeros(1))
            return parts.spread(parts.head(normed[0, -keep:]))
        logits: list[torch.Tensor] = []
        for first in range(count - keep, count, places):
            model.take(states[None, model.known[0] : first], [first])
            model.read(ids[None, model.learned[0] : first + 1])
            logits += [model.step(ids[None, place, None]) for place in range(first, min(first + places, count))]
        return torch.cat(logits)
