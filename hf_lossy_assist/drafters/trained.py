"""Drafters with a trained network on the target's hidden states: EAGLE-3, token by token
(huggingface.co/papers/2503.01840), and those of a block.

DFlash drafts a block of tokens in one forward (2602.06036). DSpark (2607.05147) and DFlash 2 are the same with a
correction of each position by the token before it.
"""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from ..models.introspection import tokens_known, vocabulary_of
from .hidden_state import HiddenStateDrafter
from .networks.corrected_networks import DFlash2Network, DSparkNetwork
from .networks.dflash_network import DFlashNetwork
from .networks.eagle_network import Eagle3Network


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(HiddenStateDrafter):
    """A trained network of EAGLE-3. It drafts chains only, no trees.

    Args: see `HiddenStateDrafter`.
    """

    network: Eagle3Network
    kind: ClassVar[str] = "an EAGLE-3 drafter"
    model_type: ClassVar[str] = "eagle3"
    networks: ClassVar[tuple[type, ...]] = (Eagle3Network,)

    def check_tokens(self, base: PreTrainedModel) -> None:
        config, size = self.network.config, vocabulary_of(base)
        highest = int(self.network.target_ids.max()) + 1 if config.reduced else config.draft_vocab_size
        if highest > size or config.layer.vocab_size > base.get_input_embeddings().weight.shape[0]:
            raise ValueError(
                f"{self.name} knows token ids up to {max(highest, config.layer.vocab_size)}, and the target has "
                f"{size}: it is another target's"
            )


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
        vocabulary = tokens_known(base) if self.network.embed_tokens is None else config.layer.vocab_size
        highest = -1 if config.draft_vocab_size is None else int(self.network.target_ids.max())
        if config.mask >= vocabulary or highest >= size:
            raise ValueError(
                f"{self.name} knows token ids that the target of {size} tokens has not: it is another target's"
            )


@dataclass(frozen=True, eq=False)
class DFlash2Drafter(DFlashDrafter):
    """A trained DFlash 2 network: a DFlash drafter whose tokens depend on those before them in the block, each one of a
    few likely ones.

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

    Its confidence head is not read. Args: see `HiddenStateDrafter`.
    """

    network: DSparkNetwork
    kind: ClassVar[str] = "a DSpark drafter"
    model_type: ClassVar[str] = "dspark"
    networks: ClassVar[tuple[type, ...]] = (DSparkNetwork,)

    def check_tokens(self, base: PreTrainedModel) -> None:
        super().check_tokens(base)
        if self.network.markov_head is not None:
            refuse_another_table(self, "a Markov head", base)


def refuse_another_table(drafter: DFlashDrafter, what: str, base: PreTrainedModel) -> None:
    """Refuse a target whose tokens are not those of `what`, a table over the target's tokens.
    Raises: `ValueError`, one line."""
    size, read, written = drafter.network.config.layer.vocab_size, tokens_known(base), vocabulary_of(base)
    if size < read or (drafter.network.lm_head is None and size != written):
        raise ValueError(
            f"{drafter.name} has {what} of {size} tokens, and the target reads {read} and writes {written}: it is "
            "another target's"
        )
