"""Drafters on the target's own hidden states at work in one call: what the target read reaches their networks."""

import copy
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch

from ..artifacts.features import FeatureTap
from ..batch.processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.layer_states import LayerStates
from ..models.states_network import StatesNetwork
from ..round import Draft, Verified
from ..stops import StopRun
from .base import DraftContext, DrafterRun
from .model import MANY, AssistantRun, Steps, head_taps


class LearnsStates(CachedModel, Protocol):
    """A draft network with a cache, which is told the target's states."""

    @property
    def network(self) -> StatesNetwork: ...

    known: list[int]  # tokens of each row whose states the target gave

    def learn(self, states: torch.Tensor, ends: Sequence[int]) -> None:
        """The target's states (B, Q, layers · H) of the tokens behind those known, of which row b's are right up to token `ends[b]`."""

    def mark(self) -> Any:
        """What `back_to` is given, to forget what was fed since."""

    def back_to(self, mark: Any) -> None:
        """Forget what was fed since `mark`."""

    def together(self) -> Self:
        """A model whose first row is the only one of this; others come by `take`. Raises: `NotJoined` for one that cannot."""

    def take(self, b: int, other: Any) -> None:
        """Row b holds from now on what the only row of `other` holds."""


class StatesRun(AssistantRun):
    """Such a drafter at work in one call.

    It cannot draft before the target has read the prompt. Where prompts have a forward of their own, it drafts in the first round, else in the second.
    """

    reads_target = True
    model: LearnsStates

    def __init__(self, model: LearnsStates, states: LayerStates, context: DraftContext):
        super().__init__(model, context, **head_taps(model.network, context))
        self.target_states, self.begins = states, list(context.held) or [0] * len(context.rows.index)
        self.rounds, self.untold = 1, list[torch.Tensor]()

    def hold_back(self, rounds: int) -> None:
        """From now on tell the network the target's states after every `rounds`-th round alone, in rounds of one token each: between them it stands on
        its own, as in a draft of so many tokens, whatever tokens the text goes on with.
        """
        self.rounds = rounds

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return ()  # whose prompts the engine would have it read before the target has

    @property
    def taps(self) -> Sequence[FeatureTap]:
        return [*super().taps, self.target_states]  # type: ignore[list-item]

    def prompts_are_read(self, rows: Rows) -> None:
        self._learn_prompts(rows)
        tokens, counts = rows.after(self.model.lengths)
        if min(counts) > MANY:  # else the rows that they join would be fed as many tokens beside them
            with self.clock.time("draft"):
                self.model.feed(tokens[:, :-1], [count - 1 for count in counts], keep=0)

    def _learn_prompts(self, rows: Rows) -> None:
        """Tell the network the target's states of the prompts, if it has read them."""
        states = self.target_states.take()
        if states is not None:
            self.model.learn(states, rows.held())

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        if self.model.known == self.begins:
            self._learn_prompts(rows)
        rooms = zip(limits, self.model.known, self.begins, strict=True)
        can = [limit if known > begin else 0 for limit, known, begin in rooms]
        return super().propose(rows, can, randomness)

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        states = self.target_states.take()
        assert states is not None, "the target has read the round"
        self.untold.append(states)
        if len(self.untold) < self.rounds:
            return
        super().learn(rows, verified, accepted)
        self.model.learn(torch.cat(self.untold, dim=1), rows.held())
        self.untold.clear()

    def _draft(self, rows: Rows, limits: Sequence[int], steps: Steps) -> Draft:
        mark = self.model.mark() if self.rounds > 1 else None
        draft = super()._draft(rows, limits, steps)
        if (
            mark is not None
        ):  # a drafted token's state may have cost a forward over it; the text may go on with another
            self.model.back_to(mark)
        return draft

    def select(self, keep: Sequence[int]) -> None:
        super().select(keep)
        self.begins = [self.begins[row] for row in keep]

    def together(self, seats: int, stop: StopRun, processing: Processing) -> "StatesRun":
        out = copy.copy(self)
        out.model, out.stop, out.processing, out.begins = self.model.together(), stop, processing, list(self.begins)
        return out

    def take(self, b: int, number: int, other: DrafterRun) -> None:
        assert isinstance(other, StatesRun)
        self.model.take(b, other.model)
        self.begins[b:] = [*other.begins, *self.begins[b + 1 :]]
