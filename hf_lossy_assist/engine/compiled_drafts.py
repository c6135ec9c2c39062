"""Adapters between compiled rounds and their drafters: a draft model, or a network on the target's hidden states."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..batch.rows import Rows
from ..drafters.base import DrafterRun
from ..drafters.hidden_state import HiddenStateRun
from ..drafters.model import AssistantRun
from ..drafters.networks.base import Memory, Parts
from ..models.compiled.compilation import Signature
from ..models.compiled.static_cache import StaticRowCache
from ..models.compiled.static_model import StaticRowModel
from .compiled_round import DraftBlock


class ModelDraft:
    """A draft model on a static cache. Each round feeds it the last two tokens again, so that all rounds have one shape."""

    longest: int | None = None  # longest draft in tokens; None: no limit
    spare = 0  # cache slots of a draft in addition to one for each token
    partial = False  # the draft vocabulary lacks some of the target's tokens

    def __init__(self, run: AssistantRun, model: StaticRowModel):
        self.run, self.model, self.network = run, model, model.model

    @property
    def signature(self) -> Signature:
        return self.model.signature

    @property
    def cache(self) -> StaticRowCache:
        return self.model.cache

    @property
    def traced(self) -> DraftBlock:
        return self.model.tensors

    def layers(self, tokens: int) -> int:
        """Count the layers of a graph that drafts `tokens` tokens."""
        return tokens * len(self.cache.layers)

    def is_ready(self, rows: Rows) -> bool:
        """Return whether the cache is in the state in which a compiled round leaves it."""
        pairs = zip(self.model.lengths, rows.cached_lengths(), strict=True)
        return self.model.is_ready() and all(n >= h - 1 for n, h in pairs)

    def allocate(self) -> None:
        """Allocate the cache, unless it exists."""
        self.model.allocate(1)

    def blank(self, rows: int) -> Memory:
        """Return an empty memory for `rows` rows, for ahead-of-time compilation."""
        return ()

    def memory(self, rows: Rows) -> Memory:
        """Return the drafter's input besides the text."""
        return ()

    def follow(
        self, before: Sequence[int], accepted: Sequence[int], gamma: int, now: Sequence[int], memory: Memory
    ) -> None:
        """Roll back after a round of `gamma` drafted tokens; `before` and `now` count the target's cached tokens."""
        triples = zip(before, accepted, now, strict=True)
        self.model.rollback([min(h + min(n + 1, gamma), m) for h, n, m in triples])


class StatesDraft:
    """A network on the target's hidden states. Same interface as `ModelDraft`."""

    def __init__(self, run: HiddenStateRun):
        self.run, self.model, self.network = run, run.model, run.model.network
        self.longest, self.spare = self.network.longest, self.network.spare
        self.signature, self.partial = Signature.of(self.network), self.network.config.reduced

    @property
    def cache(self) -> StaticRowCache:
        return self.model.parts.cache

    @property
    def traced(self) -> DraftBlock:
        return self.model.parts

    def layers(self, tokens: int) -> int:
        return (1 + tokens if self.longest is None else 1) * len(self.cache.layers)

    def is_ready(self, rows: Rows) -> bool:
        return self.run.is_ready(rows)

    def allocate(self) -> None:
        if not self.cache.layers[0].is_initialized:
            self._begun(self.model.parts, len(self.model.known))

    def blank(self, rows: int) -> Memory:
        return self._begun(self.model.parts._replace(cache=StaticRowCache(len(self.network.layers), 1)), rows)

    def _begun(self, parts: Parts, rows: int) -> Memory:
        """Run both functions of the network on `rows` texts of one token; return what the first one returns."""
        parts.cache.reserve(2 + self.spare)
        one = torch.ones(rows, dtype=torch.int64, device=self.model.device)
        states = one.new_zeros(rows, 1, self.network.fc.in_features, dtype=self.model.dtype)
        memory = parts.learn(one[:, None][:, :0], one - 1, one - 1, one[:, None], states)
        parts.step(one[:, None], one, one[0] - 1, memory)
        return memory

    def memory(self, rows: Rows) -> Memory:
        self.allocate()
        self.run.read(rows)
        assert self.model.memory is not None, "the target's states are known"
        # Dynamo guards on whether an input is a view, hence a copy.
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in self.model.memory)

    def follow(
        self, before: Sequence[int], accepted: Sequence[int], gamma: int, now: Sequence[int], memory: Memory
    ) -> None:
        self.model.follow(now, memory)


CompiledDraft: TypeAlias = ModelDraft | StatesDraft


def why_not_drafted(drafter: DrafterRun) -> str | None:
    """Return why this drafter cannot draft in compiled rounds; None if it can."""
    if isinstance(drafter, HiddenStateRun):
        return drafter.why_not_compiled()
    if not (
        drafter.is_plain_model and isinstance(drafter, AssistantRun) and isinstance(drafter.model, StaticRowModel)
    ):
        return drafter.why_eager
    return None if drafter.model.is_ready() else drafter.model.eager_because


def compiled_draft(drafter: DrafterRun) -> CompiledDraft:
    """Return the adapter of a drafter for which `why_not_drafted` is None."""
    if isinstance(drafter, HiddenStateRun):
        return StatesDraft(drafter)
    assert isinstance(drafter, AssistantRun) and isinstance(drafter.model, StaticRowModel)
    return ModelDraft(drafter, drafter.model)
