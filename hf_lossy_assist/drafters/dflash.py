"""DFlash: a network on the target's hidden states that drafts a block of tokens in one forward (huggingface.co/papers/2602.06036).

DSpark (2607.05147) and DFlash 2 are the same with a correction of each position by the token before it.
"""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from ..models.introspection import tokens_known, vocabulary_of
from .hidden_state import HiddenStateDrafter
from .networks.dflash2_network import DFlash2Network
from .networks.dflash_network import DFlashNetwork
from .networks.dspark_network import DSparkNetwork


@dataclass(frozen=True, eq=False)
class DFlashDrafter(HiddenStateDrafter):
    """A trained DFlash network, which drafts up to `network.config.drafts` tokens a round.

    Args: see `HiddenStateDrafter`.
    """

    network: DFlashNetwork
    kind: ClassVar[str] = "a DFlash drafter"
    model_type: ClassVar[str] = "dflash"
    networks: ClassVar[tuple[type, ...]] = (DFlashNetwork,)

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
