"""What drafters on the target's own hidden states share: the states reach them after each forward of the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ..artifacts.features import FeatureTap
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached import CachedModel
from ..models.inspect import base_of
from ..models.layer_states import LayerStates
from ..round import Draft, Verified
from .base import DraftContext, Drafter
from .model import AssistantRun


class LearnsStates(CachedModel, Protocol):
    """A draft network with a cache, which is told the target's states."""

    known: list[int]  # tokens of each row whose states the target gave

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        """The target's states (B, Q, layers · H) of the tokens behind those known, of which row b's are right up to token `ends[b]`."""


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


class StatesDrafter(Drafter):
    """The base of drafters on the target's hidden states."""

    kind: ClassVar[str]  # how messages name it
    gives_probs: ClassVar[bool] = True
    asks_stop: ClassVar[bool] = True

    def prepare(self, context: DraftContext, network: torch.nn.Module) -> None:
        """Refuse a stop that it cannot serve, and have the network beside the target, in its precision. Raises: `ValueError`."""
        stop = context.stop.settings
        if stop.features is not None:
            raise ValueError(
                f"{type(stop).__name__}: its head reads the {stop.features}, which {self.kind} does not have: use a stop without a head"
            )
        table = base_of(context.target).get_input_embeddings().weight
        if any(isinstance(its, torch.nn.Linear) for its in network.modules()):  # not in int8
            network.to(device=table.device, dtype=table.dtype)


class StatesRun(AssistantRun):
    """Such a drafter at work in one call.

    It cannot draft before the target has read the prompt. Where prompts have a forward of their own, it drafts in the first round, else in the second.
    """

    reads_target = True
    model: LearnsStates

    def __init__(self, model: LearnsStates, states: LayerStates, context: DraftContext):
        super().__init__(model, context.stop, context.processing, context.vocabulary, context.sampling, context.clock)
        self.target_states, self.begins = states, list(context.held) or [0] * len(context.rows.index)

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return ()  # whose prompts the engine would have it read before the target has

    @property
    def taps(self) -> Sequence[FeatureTap]:
        return [*super().taps, self.target_states]  # type: ignore[list-item]

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        if self.model.known == self.begins:
            states = self.target_states.take()
            if states is not None:  # of the prompts but for their last tokens
                self.model.learn(states, rows.held())
        rooms = zip(limits, self.model.known, self.begins, strict=True)
        can = [limit if known > begin else 0 for limit, known, begin in rooms]
        return super().propose(rows, can, randomness)

    def learn(
        self, rows: Rows, verified: Verified, accepted: Sequence[int], target_hidden: torch.Tensor | None = None
    ) -> None:
        super().learn(rows, verified, accepted)
        states = self.target_states.take()
        assert states is not None, "the target has read the round"
        self.model.learn(states, rows.held())

    def select(self, keep: Sequence[int]) -> None:
        super().select(keep)
        self.begins = [self.begins[row] for row in keep]
