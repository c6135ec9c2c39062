"""One round as a pure tensor function for torch.compile: draft × γ → verify → accept, with the stages and rules of
`loop`.

No value is read on the host. Shapes follow from the plan (B, γ, capacity): finished rows stay in the batch with a limit
of 0, and the draft model is always fed two committed tokens, so that no shape depends on the round before. A draft
network on the target's hidden states is updated at the end of a round. A stop that reads each token splits the round:
`draft_block` until no row drafts on, then `finish_round`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from transformers import LogitsProcessorList

from ..batch.rows import Rows
from ..drafters.base import DrafterRun, fit_vocabulary
from ..drafters.hidden_state import HiddenStateRun
from ..drafters.model import AssistantRun
from ..drafters.networks.base import Memory
from ..models.compiled.compilation import Signature
from ..models.compiled.static_cache import StaticRowCache
from ..models.compiled.static_model import StaticBlock, StaticRowModel, run_block
from ..round import Draft, Reading, Selection, Verdict, Verified
from ..rules import RuleRun, accept
from ..rules.base import race
from ..stops import DraftStop
from ..stops.base import entropy
from ..stops.cost_model import bins_of
from ..stops.joint_goodput import JointTensors
from ..tensors import keep_one_token
from .stages import pack_round


Races = Sequence[torch.Tensor] | None  # γ × (B, V), exponentially distributed; None in greedy decoding
# The table of `pack_round`, `RoundState.last`, `RoundState.cached`, and the next draft's memory.
Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Memory]


class DraftBlock(Protocol):
    """The drafter of a compiled round: a NamedTuple with the network as `model`."""

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, num_drafted: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        """Draft token `num_drafted` () of a round; return its logits (B, V) and the memory for the next token.

        `inputs` (B, 1 or 2): the preceding tokens. `cached` (B,): see `RoundState`. `memory`: as returned for the token
            before.
        """

    def learn(self, reading: Reading) -> Memory:
        """Update with the target's states of the last committed token and the drafted ones; return the next memory."""


class ModelDraft:
    """A draft model on a static cache in compiled rounds.

    Each round feeds it the last two tokens again, so that all rounds have one shape.
    """

    longest: int | None = None  # longest draft in tokens; None: no limit
    spare = 0  # cache slots of a draft in addition to one for each token
    extra_steps = 0  # forwards before the first token's
    partial = False  # the draft vocabulary lacks some of the target's tokens

    def __init__(self, run: AssistantRun, model: StaticRowModel):
        self.run, self.model, self.network = run, model, model.model

    @property
    def signature(self) -> Signature:
        return self.model.signature

    @property
    def traced(self) -> DraftBlock:
        return self.model.tensors

    @property
    def cache(self) -> StaticRowCache:
        return self.model.cache

    def is_ready(self, rows: Rows) -> bool:
        """Return whether the cache is in the state in which a compiled round leaves it."""
        pairs = zip(self.model.lengths, rows.cached_lengths(), strict=True)
        return self.model.is_ready() and all(n >= h - 1 for n, h in pairs)

    def begin(self) -> Memory:
        """Allocate the cache for ahead-of-time compilation, unless it exists; return a memory without a text."""
        self.model.allocate(1)
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
    """A network on the target's hidden states in compiled rounds. Same interface as `ModelDraft`."""

    extra_steps = 1  # it reads the target's states

    def __init__(self, run: HiddenStateRun):
        self.run, self.model, self.network = run, run.model, run.model.network
        self.longest, self.spare = self.network.longest, self.network.spare
        self.signature, self.partial = Signature.of(self.network), self.network.config.reduced
        self.is_ready = run.is_ready

    @property
    def traced(self) -> DraftBlock:
        return self.model.stack

    @property
    def cache(self) -> StaticRowCache:
        return self.model.stack.cache

    def begin(self) -> Memory:
        """Run both functions of the network on texts of one token; return what `learn` returns."""
        self.cache.reserve(2 + self.spare)
        one = torch.ones(len(self.model.known), dtype=torch.int64, device=self.model.device)
        states = one.new_zeros(len(one), 1, self.network.fc.in_features, dtype=self.model.dtype)
        memory = self.model.stack.learn(Reading(one[:, None][:, :0], one - 1, one - 1, one[:, None], states))
        self.model.stack.step(one[:, None], one, one[0] - 1, memory)
        return memory

    def memory(self, rows: Rows) -> Memory:
        if not self.cache.layers[0].is_initialized:
            self.begin()
        self.run.read(rows)
        assert self.model.memory is not None, "the target's states are known"
        # Dynamo guards on whether an input is a view, hence a copy.
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in self.model.memory)

    def follow(
        self, before: Sequence[int], accepted: Sequence[int], gamma: int, now: Sequence[int], memory: Memory
    ) -> None:
        self.model.follow(now, memory)


def why_not_drafted(drafter: DrafterRun) -> str | None:
    """Return why this drafter cannot draft in compiled rounds; None if it can."""
    if isinstance(drafter, HiddenStateRun):
        return drafter.why_not_compiled()
    if not (
        drafter.is_plain_model and isinstance(drafter, AssistantRun) and isinstance(drafter.model, StaticRowModel)
    ):
        return drafter.why_eager
    return None if drafter.model.is_ready() else drafter.model.eager_because


def compiled_draft(drafter: DrafterRun) -> ModelDraft | StatesDraft:
    """Return the adapter of a drafter for which `why_not_drafted` is None."""
    if isinstance(drafter, HiddenStateRun):
        return StatesDraft(drafter)
    assert isinstance(drafter, AssistantRun) and isinstance(drafter.model, StaticRowModel)
    return ModelDraft(drafter, drafter.model)


@dataclass(frozen=True)
class RoundPlan:
    """The constants of a compiled round; each combination is a graph."""

    gamma: int  # tokens to draft in the round or block
    sampling: bool
    keeps_probs: bool  # a rule reads q in greedy decoding, too
    vocabulary: int  # size of the target's vocabulary
    partial: bool = False  # the drafter gives −inf to some tokens of the vocabulary


class RoundRules(NamedTuple):
    """The parts of a call that make decisions in its rounds."""

    rule: RuleRun
    stop: DraftStop | None  # called after each drafted token
    processors: LogitsProcessorList
    joint: JointTensors | None = None  # state of a joint stop


class RoundNumbers(NamedTuple):
    """The random numbers of a round, drawn in advance; None if not read.
    Has the interface of `Randomness` that `accept` uses."""

    bonus: torch.Tensor | None  # (B, V) exponential, for the token after the draft
    uniforms: torch.Tensor | None  # (B, γ) in [0, 1)

    def coins(self, verified: Verified) -> torch.Tensor:
        """Return (B, γ) float32 in [0, 1)."""
        assert self.uniforms is not None
        return self.uniforms

    def draw(self, probs: torch.Tensor, row_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Draw one token from each distribution (B, V)."""
        assert self.bonus is not None
        return race(probs, self.bonus)


class RoundState(NamedTuple):
    """The state of the rows before a round, int64."""

    last: torch.Tensor  # (B, 2): last two committed tokens
    cached: torch.Tensor  # (B,): tokens in the target's cache, all but the last one
    limits: torch.Tensor  # (B,): draft limit of each row
    row_ids: torch.Tensor  # (B,): index of each row in the call
    ends: torch.Tensor  # (E,): end tokens


class DraftProgress(NamedTuple):
    """The state of an unfinished draft."""

    inputs: torch.Tensor  # (B, 2): last two tokens; the first is fed again so that all blocks have one shape
    drafted: torch.Tensor  # () int64: tokens drafted so far
    lengths: torch.Tensor  # (B,) int64: valid tokens of each row
    active: torch.Tensor  # (B,) bool: rows that draft on
    memory: Memory  # of the drafter
    worth: torch.Tensor  # (B,) float32, see `JointTensors`

    @classmethod
    def first(cls, state: RoundState, memory: Memory) -> "DraftProgress":
        """Return the state before the first token of a round."""
        none = torch.zeros_like(state.limits)
        return cls(state.last, none[0], none, state.limits > 0, memory, torch.ones_like(none, dtype=torch.float32))


class DraftedBlock(NamedTuple):
    """The output of draft steps. Fields as in `Draft`."""

    tokens: torch.Tensor
    probs: torch.Tensor | None
    validity: torch.Tensor
    bins: torch.Tensor | None = None  # (B, γ) int64, for a joint stop

    @classmethod
    def join(cls, blocks: Sequence["DraftedBlock"], width: int) -> "DraftedBlock":
        """Concatenate blocks and pad with zeros, which are never read, to `width` tokens."""

        def cat(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
            missing = width - sum(piece.shape[1] for piece in pieces)
            return torch.cat([*pieces, pieces[0].new_zeros(len(pieces[0]), missing, *pieces[0].shape[2:])], dim=1)

        probs = [block.probs for block in blocks if block.probs is not None]
        tokens, validity = cat([block.tokens for block in blocks]), cat([block.validity for block in blocks])
        return cls(tokens, cat(probs) if probs else None, validity)


def run_round(
    plan: RoundPlan,
    target: StaticBlock,
    draft: DraftBlock,
    rules: RoundRules,
    state: RoundState,
    memory: Memory,
    races: Races,
    numbers: RoundNumbers,
) -> Outcome:
    """Run one round."""
    drafted, progress, _ = draft_block(plan, draft, rules, state, DraftProgress.first(state, memory), races)
    return finish_round(plan, target, draft, rules, state, drafted, progress.lengths, numbers)


def draft_block(
    plan: RoundPlan, draft: DraftBlock, rules: RoundRules, state: RoundState, progress: DraftProgress, races: Races
) -> tuple[DraftedBlock, DraftProgress, torch.Tensor]:
    """Draft `plan.gamma` more tokens for every row; tokens after a row's limit, stop or end token do not count.

    The third result, () bool, is whether any row drafts on.
    """
    (inputs, before, lengths, active, memory, worth), tokens, probs, validity = progress, [], [], []
    bins: list[torch.Tensor] = []
    for i in range(plan.gamma):
        raw, memory = draft.step(inputs, state.cached, before + i, memory)
        fit = fit_vocabulary(raw.float(), plan.vocabulary)
        logits = fit
        if rules.processors:
            logits = rules.processors(inputs.new_zeros(len(fit), 0), fit)
        if raw.shape[-1] < plan.vocabulary or plan.partial:
            logits = keep_one_token(logits, fit)
        if plan.keeps_probs:
            probs.append(logits.softmax(dim=-1))
        if races is not None:
            token, valid = race(probs[-1], races[i]), probs[-1][:, 0]
        else:
            valid, token = logits.max(dim=-1)
        tokens.append(token)
        validity.append(valid)
        lengths = lengths + active
        active = active & (before + i + 1 < state.limits) & ~torch.isin(token, state.ends)
        if rules.joint is not None:
            bins.append(bins_of(entropy(fit), rules.joint.edges))
            worth = worth * rules.joint.factors[bins[-1]]
        if rules.stop is not None:
            active = active & ~rules.stop.should_stop(token[:, None], (fit,))
        inputs = token[:, None]
    if rules.joint is not None:
        # After the block only, since its tokens are drafted and verified in any case.
        active = active & (worth @ active.float() >= rules.joint.least)
    inputs = torch.stack(tokens[-2:], dim=1) if plan.gamma > 1 else inputs
    stacked = [torch.stack(steps, dim=1) if steps else None for steps in (probs, bins)]
    block = DraftedBlock(torch.stack(tokens, dim=1), stacked[0], torch.stack(validity, dim=1), stacked[1])
    return block, DraftProgress(inputs, before + plan.gamma, lengths, active, memory, worth), active.any()


def finish_round(
    plan: RoundPlan,
    target: StaticBlock,
    draft: DraftBlock | None,
    rules: RoundRules,
    state: RoundState,
    drafted: DraftedBlock,
    lengths: torch.Tensor,
    numbers: RoundNumbers,
) -> Outcome:
    """Verify and accept a drafted block. `draft`: updated with the target's hidden states; None: no update."""
    tokens, probs, validity, _ = drafted
    proposed = Draft(tokens, lengths, state.row_ids, plan.gamma, plan.sampling, probs=probs, validity=validity)
    logits, states = run_block(target, torch.cat([state.last[:, 1:], tokens], dim=1), state.cached)
    logits = logits.float()
    batch, width, size = logits.shape
    if rules.processors:
        logits = rules.processors(tokens[:, :0].repeat_interleave(width, dim=0), logits.reshape(-1, size))
    verified = Verified(Selection(proposed, lengths, sends_all=True), logits.view(batch, width, size))
    verdict: Verdict = accept(rules.rule, verified, numbers)
    # The next state, unless a row ends in this round.
    before = torch.cat([state.last[:, 1:], tokens], dim=1).gather(1, verdict.accepted[:, None])
    last = torch.cat([before, verdict.token[:, None]], dim=1)
    memory: Memory = ()
    if draft is not None and states is not None:
        memory = draft.learn(Reading(tokens, state.cached, verdict.accepted, last[:, 1:], states))
    return pack_round(verified, verdict), last, state.cached + verdict.accepted + 1, memory
