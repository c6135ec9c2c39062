"""DFlash: a network on the target's own hidden states that drafts a block of tokens in one forward (huggingface.co/papers/2602.06036)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureTap
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.block_model import BlockModel
from ..models.dflash import DFlashNetwork
from ..models.introspection import base_of, tokens_known, vocabulary_of
from ..models.layer_states import LayerStates
from ..round import Draft
from .base import DraftContext
from .states import StatesDrafter
from .states_run import StatesRun


@dataclass(frozen=True, eq=False)
class DFlashDrafter(StatesDrafter):
    """A trained network, which drafts up to `network.config.drafts` tokens a round.

    Args: as of `StatesDrafter`.
    """

    network: DFlashNetwork
    kind: ClassVar[str] = "a DFlash drafter"
    model_type: ClassVar[str] = "dflash"
    networks: ClassVar[tuple[type, ...]] = (DFlashNetwork,)

    def check(self, target: Any) -> None:
        """Refuse a target that it was not made for, as far as its sizes say so. Raises: `ValueError`."""
        config, base, size = self.network.config, base_of(target), vocabulary_of(target)
        self.check_widths(base)
        known = tokens_known(base) if self.network.embed_tokens is None else config.layer.vocab_size
        if config.mask >= known or (config.draft_vocab_size is not None and int(self.network.kept.max()) >= size):
            raise ValueError(
                f"{self.name} knows token ids that the target of {size} tokens has not: it is another target's"
            )
        LayerStates(target, config.target_layers)

    def start(self, context: DraftContext) -> "DFlashRun":
        for spec in (context.stop.settings.features, context.features):
            if spec is not None and spec.reads("draft") and spec.position != "predicting":
                raise ValueError(
                    f"a head here reads the {spec}, and {self.kind} has none of it: a block is filled in before its tokens are drawn; use svip, "
                    "or a head on the state that predicts the token (hf-lossy collect)"
                )
        self.check(context.target)
        base, rows, network = base_of(context.target), context.rows, self.beside(context.target).network
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

    def hold_back(self, rounds: int) -> None:
        super().hold_back(min(rounds, self.model.network.config.drafts))

    def prompts_are_read(self, rows: Rows) -> None:
        self._learn_prompts(rows)  # which is all that it reads of a text

    def _last(self, tap: FeatureTap, counts: list[int]) -> torch.Tensor:
        """Of the place that was said last: one forward has them all."""
        return tap.at(self.model.network.config.first + self.model.said - 1)

    def _behind(self, rows: Rows) -> tuple[torch.Tensor, list[int]]:
        return rows.after(rows.held())  # a block begins with the last token, and reads no other
