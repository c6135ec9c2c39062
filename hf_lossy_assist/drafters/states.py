"""What drafters on the target's own hidden states share: the states reach them after each forward of the target."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch

from ..artifacts.features import FeatureTap
from ..batch.processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached import CachedModel
from ..models.identity import ModelIdentity
from ..models.inspect import base_of
from ..models.int8 import linears_in_int8
from ..models.layer_states import LayerStates
from ..models.states_network import StatesNetwork
from ..models.trials import why_not_rows
from ..round import Draft, Verified
from ..stops import StopRun
from ..validation import shown
from .base import DraftContext, Drafter, DrafterRun
from .model import AssistantRun, Steps, head_taps


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
class StatesDrafter(Drafter):
    """The base of drafters on the target's hidden states.

    Args:
        network: what drafts. source: where it was loaded from. proposal: what its files suggest; `proposal.policy` is never used unasked.
    """

    network: Any
    source: str | None = None
    proposal: Proposal = Proposal()
    kind: ClassVar[str]  # how messages name it
    model_type: ClassVar[str]  # how profiles and heads name it
    networks: ClassVar[tuple[type, ...]]  # what `network` may be
    gives_probs: ClassVar[bool] = True
    gives_states: ClassVar[bool] = True
    asks_stop: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.network, self.networks):
            own = type(self).__name__
            raise TypeError(
                f"{own}.network: expected a network of class {self.networks[0].__name__}, got {shown(self.network)}: load one with load_drafter"
            )

    @property
    def identity(self) -> ModelIdentity:
        """What profiles and heads record of a draft."""
        layer, name = self.network.config.layer, self.source or self.kind
        if self.source is not None and Path(self.source).is_dir():
            name = Path(self.source).name
        sizes = layer.hidden_size, layer.num_hidden_layers, layer.vocab_size
        return ModelIdentity(name, None, self.model_type, *sizes)

    def int8(self) -> Self:
        """A copy whose linear layers compute in int8, on the CPU: a fraction of the bytes that each drafted token reads."""
        return replace(self, network=linears_in_int8(copy.deepcopy(self.network).float().cpu()))

    @property
    def name(self) -> str:
        """For messages."""
        return self.source or f"this {self.kind.split(maxsplit=1)[1]}"

    def check_widths(self, base: Any) -> None:
        """Refuse a target whose states, embeddings or head it cannot read. Raises: `ValueError`."""
        config, width = self.network.config, base.config.get_text_config(decoder=True).hidden_size
        if config.target_hidden_size != width:
            raise ValueError(
                f"{self.name} reads states of {config.target_hidden_size} numbers, and the target's have {width}: it is another target's"
            )
        own, embedded = config.layer.hidden_size, base.get_input_embeddings().weight.shape[1]
        for part, wide, what in (
            (self.network.embed_tokens, embedded, "embeddings"),
            (self.network.lm_head, width, "head"),
        ):
            if part is None and wide != own:
                raise ValueError(f"{self.name} has no {what}, and the target's are {wide} wide, not {own}")

    def prepare(self, context: DraftContext) -> None:
        """Refuse a target that it was not made for, and have the network beside it. Raises: `ValueError`."""
        self.check(context.target)
        self.beside(context.target)

    def check(self, target: Any) -> None:
        """Refuse a target that it was not made for, as far as its sizes say so. Raises: `ValueError`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method check(target)")

    def beside(self, target: Any) -> Self:
        """This drafter, its network on the target's device and in its precision, where it is not in int8."""
        table = base_of(target).get_input_embeddings().weight
        if not self.in_int8:
            self.network.to(device=table.device, dtype=table.dtype)
        return self

    # What records of a draft ask of a model.

    @property
    def in_int8(self) -> bool:
        """Whether its linear layers compute in int8."""
        return not any(isinstance(its, torch.nn.Linear) for its in self.network.modules())

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; in int8, its norms."""
        return self.network.dtype

    def state_dict(self) -> dict[str, Any]:
        """The network's weights, by name."""
        return self.network.state_dict()


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
        """As `DrafterRun.prompts_are_read`; nothing where the target has not."""
        states = self.target_states.take()
        if states is not None:
            self.model.learn(states, rows.held())

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        if self.model.known == self.begins:
            self.prompts_are_read(rows)
        rooms = zip(limits, self.model.known, self.begins, strict=True)
        can = [limit if known > begin else 0 for limit, known, begin in rooms]
        return super().propose(rows, can, randomness)

    def learn(
        self, rows: Rows, verified: Verified, accepted: Sequence[int], target_hidden: torch.Tensor | None = None
    ) -> None:
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


def refuse_models(what: str, target: Any, draft: Any) -> None:
    """Refuse a target and a draft that do not run in batches; a drafter on the target's states that is not this target's. Moves the latter beside it.

    `what`: needs them, for messages. Raises: `ValueError`, one line.
    """
    models = {"target": target, "draft": draft}
    if isinstance(draft, StatesDrafter):
        draft.check(target)
        draft.beside(target)
        del models["draft"]
    for name, model in models.items():
        reason = why_not_rows(model)
        if reason is not None:
            raise ValueError(f"{what} needs models that run in batches; the {name} does not: {reason}")
