"""EAGLE-3: one or more decoder layers on the target's own hidden states, drafting token by token (huggingface.co/papers/2503.01840)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureTap
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached import CachedModel
from ..models.eagle3 import Eagle3Network
from ..models.inspect import base_of, blocks_of, vocabulary_of
from ..models.int8 import linears_in_int8
from ..models.layer_states import LayerStates
from ..models.pairs_model import PairsModel
from ..round import Draft, Verified
from .base import DraftContext, Drafter
from .model import AssistantRun


@dataclass(frozen=True)
class Proposal:
    """What a drafter's files suggest: tokens a round, and what to accept. `accept_k` above 1 is lossy, and nothing of it is ever a default."""

    tokens: int = 5
    accept_k: int = 1
    accept_tolerance: float = 0.0

    @property
    def policy(self) -> dict[str, Any]:
        """For `lossy_policy=`: `verifier_accept_k` and `accept_tolerance` of `speculators` are the rule `top_k_tolerance`; k = 1 is strict."""
        rule: Any = "strict"
        if self.accept_k > 1:
            rule = {"name": "top_k_tolerance", "k": self.accept_k, "tolerance": self.accept_tolerance}
        return {"rule": rule, "stop": {"name": "constant", "gamma": self.tokens}}


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(Drafter):
    """A trained network. Chains alone: one token follows another; no trees.

    Args:
        network: what drafts. source: where it was loaded from. proposal: what its files suggest; `proposal.policy` is never used unasked.
    """

    network: Eagle3Network
    source: str | None = None
    proposal: Proposal = Proposal()
    gives_probs: ClassVar[bool] = True
    asks_stop: ClassVar[bool] = True

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

    def start(self, context: DraftContext) -> "Eagle3Run":
        self.check(context.target)
        rows = base_of(context.target).get_input_embeddings().weight
        if any(isinstance(its, torch.nn.Linear) for its in self.network.modules()):  # not in int8
            self.network.to(device=rows.device, dtype=rows.dtype)
        return Eagle3Run(self.network, context)


def states_of(target: Any, network: Eagle3Network) -> LayerStates:
    """What keeps the states of the target that a network reads. Raises: `ValueError` where the target has no such layers."""
    blocks = blocks_of(base_of(target)) or ()
    return LayerStates(target, network.config.layers_of(len(blocks)))


class Eagle3Run(AssistantRun):
    """An EAGLE-3 network at work in one call.

    It cannot draft before the target has read the prompt. Where prompts have a forward of their own, it drafts in the first round, else in the second.
    """

    model: PairsModel

    def __init__(self, network: Eagle3Network, context: DraftContext):
        base, rows = base_of(context.target), context.rows
        embedding = network.embed_tokens or base.get_input_embeddings()
        model = PairsModel(network, embedding, len(rows.index), rows.max_length, context.vocabulary)
        super().__init__(model, context.stop, context.processing, context.vocabulary, context.sampling, context.clock)
        self.target_states = states_of(context.target, network)

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return ()  # whose prompts the engine would have it read before the target has

    @property
    def taps(self) -> Sequence[FeatureTap]:
        return [*super().taps, self.target_states]  # type: ignore[list-item]

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        if not any(self.model.known):
            states = self.target_states.take()
            if states is not None:  # of the prompts but for their last tokens
                self.model.learn(states, rows.held())
        can = [limit if known > 0 else 0 for limit, known in zip(limits, self.model.known, strict=True)]
        return super().propose(rows, can, randomness)

    def learn(
        self, rows: Rows, verified: Verified, accepted: Sequence[int], target_hidden: torch.Tensor | None = None
    ) -> None:
        super().learn(rows, verified, accepted)
        states = self.target_states.take()
        assert states is not None, "the target has read the round"
        self.model.learn(states, rows.held())
