"""A round in tensors alone: draft × γ → verify → accept as one function, for torch.compile. The same stages as `loop`, and the same rules.

Nothing here looks at a value: shapes come from the plan (B, γ, capacity), rows that have ended run along with a limit of 0, and the
draft is always fed the last two committed tokens again, so that no shape depends on what the round before accepted. A stop that looks
at each token cuts a round in three: `draft_block` some tokens at a time until no row drafts on, and `finish_round`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..drafters.base import fit_vocabulary
from ..models.compiled.static_model import Block, run_block
from ..round import Draft, Selection, Verdict, Verified
from ..rules import RuleRun, accept
from ..rules.base import race
from ..stops import DraftStop
from ..vocabulary import keep_one_token
from .commit import pack_round


@dataclass(frozen=True)
class RoundPlan:
    """What a compiled round is fixed to: another one is another graph."""

    gamma: int  # tokens to draft, of the round or of a block of it
    sampling: bool
    keeps_probs: bool  # a rule reads q in greedy decoding too
    vocabulary: int  # the target's


class RoundNumbers(NamedTuple):
    """The random numbers of a round, drawn before it begins; each None where nobody reads it. Serves `accept` as its `Randomness`."""

    behind: torch.Tensor | None  # (B, V) exponentially distributed, for the token behind the draft
    uniforms: torch.Tensor | None  # (B, γ) in [0, 1)

    def coins(self, verified: Verified) -> torch.Tensor:
        """(B, γ) float32 in [0, 1)."""
        assert self.uniforms is not None
        return self.uniforms

    def draw(self, probs: torch.Tensor, row_ids: torch.Tensor, place: int) -> torch.Tensor:
        """One token from each distribution (B, V)."""
        assert self.behind is not None
        return race(probs, self.behind)


class RoundState(NamedTuple):
    """Where the rows stand before a round, (B, …) int64 each."""

    last: torch.Tensor  # (B, 2): the last two committed tokens
    held: torch.Tensor  # (B,): how many tokens the target's cache holds, all but the last one
    limits: torch.Tensor  # (B,): how much each row may draft
    row_ids: torch.Tensor  # (B,): each row's number in the call
    ends: torch.Tensor  # (E,): end tokens


class DraftProgress(NamedTuple):
    """How far a draft has come."""

    feed: (
        torch.Tensor
    )  # (B, 2): the tokens to go on from, the first of them once more, so that all blocks have one shape
    drafted: torch.Tensor  # () int64: tokens of every row
    lengths: torch.Tensor  # (B,) int64: how many of them count
    going: torch.Tensor  # (B,) bool: which rows draft on


class DraftedBlock(NamedTuple):
    """What draft steps leave behind; the fields as in `Draft`."""

    tokens: torch.Tensor
    probs: torch.Tensor | None
    validity: torch.Tensor

    @classmethod
    def join(cls, blocks: Sequence["DraftedBlock"], width: int) -> "DraftedBlock":
        """Several blocks as one of `width` tokens; those behind them are zeros, and nobody reads them."""

        def cat(parts: list[torch.Tensor]) -> torch.Tensor:
            missing = width - sum(part.shape[1] for part in parts)
            behind = parts[0].new_zeros(parts[0].shape[0], missing, *parts[0].shape[2:])
            return torch.cat([*parts, behind], dim=1)

        probs = [block.probs for block in blocks if block.probs is not None]
        tokens, validity = cat([block.tokens for block in blocks]), cat([block.validity for block in blocks])
        return cls(tokens, cat(probs) if probs else None, validity)


def run_round(
    plan: RoundPlan,
    target: Block,
    draft: Block,
    run: RuleRun,
    processors: Any,
    state: RoundState,
    races: Sequence[torch.Tensor] | None,
    numbers: RoundNumbers,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One round → what `commit` writes down, (B, columns) int64, and `RoundState.last` and `held` behind it. `races`: as of `draft_block`."""
    drafted, progress, _ = draft_block(plan, draft, None, processors, state, first_progress(state), races)
    return finish_round(plan, target, run, processors, state, drafted, progress.lengths, numbers)


def first_progress(state: RoundState) -> DraftProgress:
    """Before the first token of a round."""
    return DraftProgress(
        state.last, torch.zeros_like(state.limits[0]), torch.zeros_like(state.limits), state.limits > 0
    )


def draft_block(
    plan: RoundPlan,
    draft: Block,
    stop: DraftStop | None,
    processors: Any,
    state: RoundState,
    progress: DraftProgress,
    races: Sequence[torch.Tensor] | None,
) -> tuple[DraftedBlock, DraftProgress, torch.Tensor]:
    """`plan.gamma` tokens more for every row; those behind a row's limit, its stop, or an end token do not count.

    `races`: γ × (B, V), exponentially distributed, None in greedy decoding. Returns also whether any row drafts on, () bool.
    """
    (feed, before, lengths, going), tokens, probs, validity = progress, [], [], []
    for i in range(plan.gamma):
        raw = run_block(draft, feed, state.held + 1 + before + i - feed.shape[1])[:, -1]
        fit = fit_vocabulary(raw.float(), plan.vocabulary)
        logits = _processed(processors, fit, raw)
        if plan.keeps_probs:
            probs.append(logits.softmax(dim=-1))
        if races is not None:
            token, peak = race(probs[-1], races[i]), probs[-1][:, 0]
        else:
            peak, token = logits.max(dim=-1)
        tokens.append(token)
        validity.append(peak)
        lengths = lengths + going
        going = going & ~torch.isin(token, state.ends) & (before + i + 1 < state.limits)
        if stop is not None:
            going = going & ~stop.should_stop(token[:, None], (fit,))
        feed = token[:, None]
    drafted = DraftedBlock(
        torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None, torch.stack(validity, dim=1)
    )
    behind = torch.stack(tokens[-2:], dim=1) if plan.gamma > 1 else feed
    return drafted, DraftProgress(behind, before + plan.gamma, lengths, going), going.any()


def finish_round(
    plan: RoundPlan,
    target: Block,
    run: RuleRun,
    processors: Any,
    state: RoundState,
    drafted: DraftedBlock,
    lengths: torch.Tensor,
    numbers: RoundNumbers,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify and accept what a round drafted; returns as `run_round`."""
    tokens, probs, validity = drafted
    draft = Draft(tokens, lengths, state.row_ids, plan.gamma, plan.sampling, probs=probs, validity=validity)
    verified = verify(target, draft, processors, state)
    verdict: Verdict = accept(run, verified, numbers)
    return pack_round(verified, verdict), *behind(state, tokens, verdict)


def behind(state: RoundState, tokens: torch.Tensor, verdict: Verdict) -> tuple[torch.Tensor, torch.Tensor]:
    """`RoundState.last` and `held` after a round, if no row has ended in it."""
    before = torch.cat([state.last[:, 1:], tokens], dim=1).gather(1, verdict.accepted[:, None])
    return torch.cat([before, verdict.token[:, None]], dim=1), state.held + verdict.accepted + 1


def verify(target: Block, draft: Draft, processors: Any, state: RoundState) -> Verified:
    """The target's distributions over each row's last token and its draft."""
    logits = run_block(target, torch.cat([state.last[:, 1:], draft.tokens], dim=1), state.held).float()
    batch, width, size = logits.shape
    if processors:
        logits = processors(draft.tokens[:, :0].repeat_interleave(width, dim=0), logits.reshape(-1, size))
    return Verified(Selection(draft, draft.lengths, sends_all=True), logits.view(batch, width, size))


def _processed(processors: Any, logits: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """(B, V): what the call's processors make of the draft's logits; a draft that lacks token ids keeps one at least."""
    out = processors(logits.new_zeros(len(logits), 0, dtype=torch.long), logits) if processors else logits
    return keep_one_token(out, logits) if raw.shape[-1] < logits.shape[-1] else out
