"""Drafters on the target's hidden states: settings, compatibility checks, placement, and their runs."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from transformers import PreTrainedModel
from typing_extensions import Self

from ..artifacts.features import FeatureSpec, FeatureTap
from ..artifacts.identity import ModelIdentity
from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.compiled.compilation import Signature
from ..models.compiled.static_cache import BufferLease
from ..models.compiled.static_model import StaticRowModel
from ..models.hidden_state_hook import HiddenStateHook
from ..models.introspection import base_of, blocks_of, tokens_known, weights_version
from ..models.packed_linears import linears_in_int8
from ..models.probe import why_not_rows
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..validation import shown
from .base import DraftContext, Drafter, DrafterRun, Proposal, fit_vocabulary
from .model import MANY, TokenwiseRun
from .networks.base import HiddenStateModel, HiddenStateNetwork


CHANGING = ("dynamic", "longrope")  # kinds of RoPE
FAR_BEHIND = 64  # states that wait at most for the network to draft again


@dataclass(frozen=True, eq=False)
class HiddenStateDrafter(Drafter):
    """Base class of drafters on the target's hidden states. A subclass implements `check_tokens`.

    Args:
        network: the draft network. source: where it was loaded from. proposal: what its files suggest;
            `proposal.policy` applies only if passed.
    """

    network: HiddenStateNetwork
    source: str | None = None
    proposal: Proposal = Proposal()
    # By device and dtype: the version of the network's weights when it was copied, and a drafter with the copy.
    _copies: dict[tuple[torch.device, torch.dtype], tuple[int, Self]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    kind: ClassVar[str]  # name in messages
    model_type: ClassVar[str]  # name in profiles and heads
    networks: ClassVar[tuple[type, ...]]  # of `network`, whose config has `layers_of(blocks)`: which states it reads
    gives_probs: ClassVar[bool] = True
    gives_states: ClassVar[bool] = True
    asks_stop: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.network, self.networks):
            raise TypeError(
                f"{type(self).__name__}.network: expected a network of class {self.networks[0].__name__}, got "
                f"{shown(self.network)}: load one with load_drafter"
            )

    def check_tokens(self, base: PreTrainedModel) -> None:
        """Refuse a target `base` with other token ids. Raises: `ValueError`, one line."""
        raise NotImplementedError(f"{type(self).__name__} needs a method check_tokens(base)")

    def make_model(
        self, target: PreTrainedModel, rows: int, limit: int, vocabulary: int, begins: Sequence[int] | None = None
    ) -> HiddenStateModel:
        """Return the network on a row cache, on the target's device. Arguments: see `HiddenStateModel`."""
        base, network = base_of(target), self.beside(target).network
        embedding = network.embed_tokens or base.get_input_embeddings()
        head = network.lm_head or base.get_output_embeddings()
        return HiddenStateModel(network, embedding, head, rows, limit, vocabulary, begins)

    def hook(self, target: PreTrainedModel) -> HiddenStateHook:
        """Return the hook that keeps the states it reads. Raises: `ValueError` if the target lacks a layer."""
        blocks = blocks_of(base_of(target)) or ()
        return HiddenStateHook(target, self.network.config.layers_of(len(blocks)))

    def start(self, context: DraftContext) -> "HiddenStateRun":
        target, rows = context.target, context.rows
        for spec in (context.stop.settings.features, context.features):
            self.check_features(spec)
        self.check(target)
        model = self.make_model(target, len(rows.row_id_list), rows.max_length, context.vocabulary, context.cached)
        hook, compiled = self.hook(target), context.compiled_target
        if compiled is None or not compiled.keep_states(hook.layers):
            return HiddenStateRun(model, hook, context, self)
        if compiled.compilation.replays({model.device}):
            model.stack.cache.lease = BufferLease(model.network, len(model.network.layers))
        return HiddenStateRun(model, compiled, context, self)

    def check_features(self, spec: FeatureSpec | None) -> None:
        """Refuse a head that reads states which this drafter does not have. Raises: `ValueError`, one line."""
        if (
            self.network.longest is not None
            and spec is not None
            and spec.reads("draft")
            and spec.position != "predicting"
        ):
            raise ValueError(
                f"a head here reads the {spec}, and {self.kind} has none of it: a block is filled in before its tokens "
                "are drawn; use svip, or a head on the state that predicts the token (hf-lossy collect)"
            )

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that this drafter was not made for, judging by its sizes. Raises: `ValueError`."""
        network, base = self.network, base_of(target)
        config, width = network.config, base.config.get_text_config(decoder=True).hidden_size
        if config.target_hidden_size != width:
            raise ValueError(
                f"{self.name} reads states of {config.target_hidden_size} numbers, and the target's have {width}: it "
                "is another target's"
            )
        size, read = config.layer.vocab_size, tokens_known(base)
        if network.embed_tokens is not None and size < read:
            raise ValueError(
                f"{self.name} has embeddings of {size} tokens, and the target reads {read}: it is another target's"
            )
        self.check_tokens(base)
        self.hook(target)

    def beside(self, target: PreTrainedModel) -> Self:
        """Return this drafter with its network on the target's device and in its dtype: a copy if they differ, except
        in int8.

        The original network is not changed, for targets elsewhere and for saving. A copy is cached until the network
        changes.
        """
        table, network = base_of(target).get_input_embeddings().weight, self.network
        device_and_dtype = table.device, table.dtype
        if self.in_int8 or device_and_dtype == (network.device, network.dtype):
            return self
        version = weights_version(network)
        if self._copies.get(device_and_dtype, (None,))[0] != version:
            moved = copy.deepcopy(network).to(device=table.device, dtype=table.dtype)
            self._copies[device_and_dtype] = version, replace(self, network=moved)
        return self._copies[device_and_dtype][1]

    def int8(self) -> Self:
        """Return a copy whose linear layers compute in int8 on the CPU, which reads a fraction of the bytes;
        itself if in int8 already."""
        if self.in_int8:
            return self
        return replace(self, network=linears_in_int8(copy.deepcopy(self.network).float().cpu()))

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.source or f"this {self.kind.split(maxsplit=1)[1]}"

    # Attributes of a model that records of drafts read.

    @property
    def identity(self) -> ModelIdentity:
        """Record of a draft in profiles and heads."""
        layer, name = self.network.config.layer, self.source or self.kind
        if self.source is not None and Path(self.source).is_dir():
            name = Path(self.source).name
        sizes = layer.hidden_size, layer.num_hidden_layers, layer.vocab_size
        return ModelIdentity(name, None, self.model_type, *sizes)

    @property
    def in_int8(self) -> bool:
        """Whether its linear layers compute in int8."""
        return not any(isinstance(module, torch.nn.Linear) for module in self.network.modules())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in; in int8, that of its norms."""
        return self.network.dtype

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the network's weights by name."""
        return self.network.state_dict()


# Types of drafts for which a head is trained or a stop calibrated.
DraftModel: TypeAlias = PreTrainedModel | HiddenStateDrafter


class HiddenStateRun(TokenwiseRun):
    """A drafter on hidden states during one call; it passes the target's states to the network.

    It cannot draft before the target has read the prompt: it starts in the first round if prompts have a separate
    forward, else in the second.
    """

    reads_target = drafts_at_once = True

    def __init__(
        self,
        model: HiddenStateModel,
        source: HiddenStateHook | StaticRowModel,
        context: DraftContext,
        drafter: HiddenStateDrafter,
    ):
        """`source`: keeps the target's states."""
        super().__init__(context, model.network)
        self.model, self.source, self.drafter = model, source, drafter
        self._joins = False

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return [*super().taps, *([self.source] if isinstance(self.source, HiddenStateHook) else [])]

    def prompts_are_read(self, rows: Rows) -> None:
        self._take_prompts(rows)
        if self._joins or self.model.behind > MANY:
            self.read(rows)

    def _take_prompts(self, rows: Rows) -> None:
        """Take the target's states of the prompts, once the target has read them. Called in each round."""
        if self.model.known == self.model.begins and (states := self.source.take_states()) is not None:
            self.model.take(states, rows.cached_lengths())

    def read(self, rows: Rows, drafts: bool = False) -> None:
        """Let the network read the states that the target has provided; see `HiddenStateModel.read`."""
        with self.clock.time("draft"):
            self.model.read(rows.uncached_tokens(self.model.learned)[0], drafts)

    def why_not_compiled(self) -> str | None:
        """Return why its rounds cannot be compiled, or None."""
        if isinstance(self.source, HiddenStateHook):
            return "the drafter reads a hidden state that is no output of the target"
        if getattr(self.model.network.rotary_emb, "rope_type", "default") in CHANGING:
            return "the drafter's RoPE changes with the length of the text"
        return Signature.of(self.model.network).hooked

    def is_ready(self, rows: Rows) -> bool:
        """Return whether the next round can be compiled: the target's states of each text are known, except for the
        last token."""
        self._take_prompts(rows)
        return self.model.known == rows.cached_lengths()

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        self._take_prompts(rows)
        model, longest = self.model, self.model.network.longest
        rooms = zip(limits, model.known, model.begins, strict=True)
        can = [min(limit, longest or limit) if provided > begin else 0 for limit, provided, begin in rooms]
        if any(can):
            self.read(rows, drafts=True)
        return super().propose(rows, can, randomness)

    def _first_input(self, rows: Rows) -> tuple[torch.Tensor, list[int]]:
        return rows.uncached_tokens(rows.cached_lengths())

    def _logits(self, feed: torch.Tensor, counts: list[int], device: torch.device) -> torch.Tensor:
        with self.clock.time("draft"):
            logits = self.model.step(feed)
        return fit_vocabulary(logits.to(device=device, dtype=torch.float32), self.vocabulary)

    def _last(self, tap: FeatureTap, counts: list[int]) -> torch.Tensor:
        return tap.at(self.model.state_column)

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        states = self.source.take_states()
        assert states is not None, "the target has read the round"
        self.model.take(states, rows.cached_lengths())
        if self._joins or self.model.behind > FAR_BEHIND:
            self.read(rows)

    def select(self, keep: Sequence[int]) -> None:
        self.model.select(keep)

    def close(self) -> None:
        if self.model.stack.cache.lease is not None:
            self.model.stack.cache.lease.give_back()

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> Self:
        out = super().fresh(rows, limit, stop, processing, clock)
        out.model, out._joins = self.model.fresh(rows, limit), True
        return out

    def insert(self, slots: Sequence[int], row_ids: Sequence[int], other: DrafterRun, rows: Sequence[int]) -> None:
        assert isinstance(other, HiddenStateRun)
        self.model.insert(slots, other.model, rows)


def refuse_models(what: str, target: PreTrainedModel, draft: DraftModel) -> None:
    """Refuse a target or draft that cannot run in batches, or a hidden-state drafter made for another target.

    `what`: the caller's name in messages. Raises: `ValueError`, one line.
    """
    models = {"target": target, "draft": draft}
    if isinstance(draft, HiddenStateDrafter):
        draft.check(target)
        del models["draft"]
    for name, model in models.items():
        reason = why_not_rows(model)
        if reason is not None:
            raise ValueError(f"{what} needs models that run in batches; the {name} does not: {reason}")
