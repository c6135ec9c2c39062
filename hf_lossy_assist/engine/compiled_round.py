"""A round in tensors alone: draft × γ → verify → accept as one function, for torch.compile. The same stages as `loop`, and the same rules.

Nothing here looks at a value: shapes come from the plan (B, γ, capacity), rows that have ended run along with a limit of 0, and the
draft model is always fed the last two committed tokens again, so that no shape depends on what the round before accepted. A draft network
on the target's hidden states learns those of a round at its end. A stop that looks at each token cuts a round in two: `draft_block` some tokens at a time until no row drafts on, and `finish_round`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from transformers import LogitsProcessorList

from ..drafters.base import fit_vocabulary
from ..models.compiled.static_model import StaticBlock, run_block
from ..round import Draft, Selection, Verdict, Verified
from ..rules import RuleRun, accept
from ..rules.base import race
from ..stops import DraftStop
from ..stops.base import entropy
from ..stops.cost_model import bins_of
from ..stops.joint_goodput import JointTensors
from ..vocabulary import keep_one_token
from .commit import pack_round


Races = Sequence[torch.Tensor] | None  # γ × (B, V), exponentially distributed; None in greedy decoding
# As of `pack_round`, then `RoundState.last` and `cached`, and the memory of the next draft.
Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


class DraftBlock(Protocol):
    """What drafts, as a compiled round is given it: a NamedTuple with the network as `model`."""

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, number: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft token `number` () of a round: its logits (B, V) and the memory of the next one.

        `inputs` (B, 1 or 2): the tokens before it. `cached` (B,): as of `RoundState`. `memory`: as the token before left it.
        """

    def learn(
        self,
        tokens: torch.Tensor,
        cached: torch.Tensor,
        accepted: torch.Tensor,
        last: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor | None:
        """Take the target's `states` (B, γ + 1, …) of a round's last token before it and its drafted `tokens` (B, γ); return the next memory.

        `accepted` (B,): how many were. `last` (B, 1): the text's last token from now on.
        """


@dataclass(frozen=True)
class RoundPlan:
    """The facts that a compiled round is fixed to: others are another graph."""

    gamma: int  # tokens to draft, of the round or of a block of it
    sampling: bool
    keeps_probs: bool  # a rule reads q in greedy decoding too
    vocabulary: int  # the target's
    partial: bool = False  # what drafts gives some tokens of it −inf


class RoundRules(NamedTuple):
    """The parts of a call that decide in its rounds."""

    rule: RuleRun
    stop: DraftStop | None  # that looks at each drafted token
    processors: LogitsProcessorList
    joint: JointTensors | None = None  # of a stop that all rows have in common


class RoundNumbers(NamedTuple):
    """The random numbers of a round, drawn before it begins; each None where nobody reads it. Serves `accept` as its `Randomness`."""

    bonus: torch.Tensor | None  # (B, V) exponentially distributed, for the token after the draft
    uniforms: torch.Tensor | None  # (B, γ) in [0, 1)

    def coins(self, verified: Verified) -> torch.Tensor:
        """Return (B, γ) float32 in [0, 1)."""
        assert self.uniforms is not None
        return self.uniforms

    def draw(self, probs: torch.Tensor, row_ids: torch.Tensor, place: int) -> torch.Tensor:
        """Draw one token from each distribution (B, V)."""
        assert self.bonus is not None
        return race(probs, self.bonus)


class RoundState(NamedTuple):
    """The rows' places before a round, (B, …) int64 each."""

    last: torch.Tensor  # (B, 2): the last two committed tokens
    cached: torch.Tensor  # (B,): how many tokens the target's cache holds, all but the last one
    limits: torch.Tensor  # (B,): how much each row may draft
    row_ids: torch.Tensor  # (B,): each row's number in the call
    ends: torch.Tensor  # (E,): end tokens


class DraftProgress(NamedTuple):
    """The state of a draft under way."""

    inputs: (
        torch.Tensor
    )  # (B, 2): the tokens to go on from, the first of them once more, so that all blocks have one shape
    drafted: torch.Tensor  # () int64: tokens of every row
    lengths: torch.Tensor  # (B,) int64: how many of them count
    active: torch.Tensor  # (B,) bool: which rows draft on
    memory: torch.Tensor | None  # of what drafts
    worth: torch.Tensor  # (B,) float32, as a joint stop has it

    @classmethod
    def first(cls, state: RoundState, memory: torch.Tensor | None) -> "DraftProgress":
        """Return the progress before the first token of a round."""
        none = torch.zeros_like(state.limits)
        return cls(state.last, none[0], none, state.limits > 0, memory, torch.ones_like(none, dtype=torch.float32))


class DraftedBlock(NamedTuple):
    """The results of draft steps; the fields as in `Draft`."""

    tokens: torch.Tensor
    probs: torch.Tensor | None
    validity: torch.Tensor
    bins: torch.Tensor | None = None  # (B, γ) int64, of a joint stop

    @classmethod
    def join(cls, blocks: Sequence["DraftedBlock"], width: int) -> "DraftedBlock":
        """Join blocks to one of `width` tokens; those after them are zeros, and nobody reads them."""

        def cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            missing = width - sum(part.shape[1] for part in parts)
            return torch.cat([*parts, parts[0].new_zeros(len(parts[0]), missing, *parts[0].shape[2:])], dim=1)

        probs = [block.probs for block in blocks if block.probs is not None]
        tokens, validity = cat([block.tokens for block in blocks]), cat([block.validity for block in blocks])
        return cls(tokens, cat(probs) if probs else None, validity)


def run_round(
    plan: RoundPlan,
    target: StaticBlock,
    draft: DraftBlock,
    rules: RoundRules,
    state: RoundState,
    memory: torch.Tensor | None,
    races: Races,
    numbers: RoundNumbers,
) -> Outcome:
    """Run one round."""
    drafted, progress, _ = draft_block(plan, draft, rules, state, DraftProgress.first(state, memory), races)
    return finish_round(plan, target, draft, rules, state, drafted, progress.lengths, numbers)


def draft_block(
    plan: RoundPlan, draft: DraftBlock, rules: RoundRules, state: RoundState, progress: DraftProgress, races: Races
) -> tuple[DraftedBlock, DraftProgress, torch.Tensor]:
    """Draft `plan.gamma` tokens more for every row; those after a row's limit, its stop, or an end token do not count.

    Returns also whether any row drafts on, () bool.
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
        # Only here: tokens of a block are drafted and verified in any case, so none of them is cut off.
        active = active & (worth @ active.float() >= rules.joint.least)
    inputs = torch.stack(tokens[-2:], dim=1) if plan.gamma > 1 else inputs
    stacked = [torch.stack(parts, dim=1) if parts else None for parts in (probs, bins)]
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
    """Verify and accept what a round drafted. `draft`: where it learns what the target keeps."""
    tokens, probs, validity, _ = drafted
    proposed = Draft(tokens, lengths, state.row_ids, plan.gamma, plan.sampling, probs=probs, validity=validity)
    logits, states = run_block(target, torch.cat([state.last[:, 1:], tokens], dim=1), state.cached)
    logits = logits.float()
    batch, width, size = logits.shape
    if rules.processors:
        logits = rules.processors(tokens[:, :0].repeat_interleave(width, dim=0), logits.reshape(-1, size))
    verified = Verified(Selection(proposed, lengths, sends_all=True), logits.view(batch, width, size))
    verdict: Verdict = accept(rules.rule, verified, numbers)
    # The state after the round, if no row has ended in it.
    before = torch.cat([state.last[:, 1:], tokens], dim=1).gather(1, verdict.accepted[:, None])
    last = torch.cat([before, verdict.token[:, None]], dim=1)
    memory = None
    if draft is not None and states is not None:
        memory = draft.learn(tokens, state.cached, verdict.accepted, last[:, 1:], states)
    return pack_round(verified, verdict), last, state.cached + verdict.accepted + 1, memory
