"""What drafters on the target's own hidden states share: their settings, what they were made for, and where they run."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from ..models.identity import ModelIdentity
from ..models.int8 import linears_in_int8
from ..models.introspection import base_of, tokens_known
from ..models.probe import why_not_rows
from ..validation import shown
from .base import Drafter


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
    # By device and dtype: the state of the network that was copied, and the drafter with the copy.
    _copies: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
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
        """A copy whose linear layers compute in int8, on the CPU: a fraction of the bytes that each drafted token reads. One in int8 stays it."""
        if self.in_int8:
            return self
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
        known = None if self.network.embed_tokens is None else config.layer.vocab_size
        if known is not None and known < tokens_known(base):
            raise ValueError(
                f"{self.name} has embeddings of {known} tokens, and the target reads {tokens_known(base)}: it is another target's"
            )
        own, embedded = config.layer.hidden_size, base.get_input_embeddings().weight.shape[1]
        for part, wide, what in (
            (self.network.embed_tokens, embedded, "embeddings"),
            (self.network.lm_head, width, "head"),
        ):
            if part is None and wide != own:
                raise ValueError(f"{self.name} has no {what}, and the target's are {wide} wide, not {own}")

    def check(self, target: Any) -> None:
        """Refuse a target that it was not made for, as far as its sizes say so. Raises: `ValueError`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method check(target)")

    def beside(self, target: Any) -> Self:
        """This drafter where the target is: with a copy of its network, if that is on another device or in another precision, and not in int8.

        Its own network stays as it is, for targets elsewhere and for saving. A copy is kept until the network is changed.
        """
        table, network = base_of(target).get_input_embeddings().weight, self.network
        place = table.device, table.dtype
        if self.in_int8 or place == (network.device, network.dtype):
            return self
        # Tensors of inference mode count no changes: nothing can be changed in them outside of it.
        state = tuple((id(p), p.data_ptr(), None if p.is_inference() else p._version) for p in network.parameters())
        if self._copies.get(place, (None,))[0] != state:
            moved = copy.deepcopy(network).to(device=table.device, dtype=table.dtype)
            self._copies[place] = state, replace(self, network=moved)
        found: Self = self._copies[place][1]
        return found

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


def refuse_models(what: str, target: Any, draft: Any) -> None:
    """Refuse a target and a draft that do not run in batches; a drafter on the target's states that is not this target's.

    `what`: needs them, for messages. Raises: `ValueError`, one line.
    """
    models = {"target": target, "draft": draft}
    if isinstance(draft, StatesDrafter):
        draft.check(target)
        del models["draft"]
    for name, model in models.items():
        reason = why_not_rows(model)
        if reason is not None:
            raise ValueError(f"{what} needs models that run in batches; the {name} does not: {reason}")
