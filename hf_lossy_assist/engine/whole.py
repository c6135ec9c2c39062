"""A round in tensors alone: draft × γ → verify → accept as one function, for torch.compile. The same stages as `loop`, and the same rules.

Nothing here looks at a value: shapes come from the plan (B, γ, capacity), rows that have ended run along with a limit of 0, and the
draft is always fed the last two committed tokens again, so that no shape depends on what the round before accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..batch.soundness import something
from ..drafters.base import fit_vocabulary
from ..models.static import Block, run_block
from ..round import Draft, Selection, Verdict, Verified
from ..rules import RuleRun, accept
from ..rules.base import race
from .commit import table_of


@dataclass(frozen=True)
class Plan:
    """What a compiled round is fixed to: another one is another graph."""

    gamma: int
    sampling: bool
    keeps_probs: bool  # a rule reads q in greedy decoding too
    vocabulary: int  # the target's


class Numbers(NamedTuple):
    """The random numbers of a round, drawn before it begins; each None where nobody reads it. Serves `accept` as its `Randomness`."""

    drafting: Sequence[torch.Tensor] | None  # γ × (B, V), exponentially distributed
    behind: torch.Tensor | None  # (B, V), for the token behind the draft
    uniforms: torch.Tensor | None  # (B, γ) in [0, 1)

    def coins(self, verified: Verified) -> torch.Tensor:
        """(B, γ) float32 in [0, 1)."""
        assert self.uniforms is not None
        return self.uniforms

    def draw(self, probs: torch.Tensor, call_rows: torch.Tensor, place: int) -> torch.Tensor:
        """One token from each distribution (B, V)."""
        assert self.behind is not None
        return race(probs, self.behind)


class State(NamedTuple):
    """Where the rows stand before a round, (B, …) int64 each."""

    last: torch.Tensor  # (B, 2): the last two committed tokens
    held: torch.Tensor  # (B,): how many tokens the target's cache holds, all but the last one
    limits: torch.Tensor  # (B,): how much each row may draft
    order: torch.Tensor  # (B,): the row of the call
    ends: torch.Tensor  # (E,): end tokens


def whole_round(
    plan: Plan, target: Block, draft: Block, run: RuleRun, processors: Any, state: State, numbers: Numbers
) -> torch.Tensor:
    """One round → what `commit` writes down, (B, columns) int64."""
    drafted = propose(plan, draft, processors, state, numbers)
    verified = verify(target, drafted, processors, state)
    verdict: Verdict = accept(run, verified, numbers)
    return table_of(verified, verdict)


def propose(plan: Plan, draft: Block, processors: Any, state: State, numbers: Numbers) -> Draft:
    """γ tokens for every row; those behind a row's limit, or behind an end token, do not count."""
    feed, starts = state.last, state.held - 1
    tokens, probs, peaks = [], [], []
    for i in range(plan.gamma):
        raw = run_block(draft, feed, starts)[:, -1]
        logits = _processed(processors, fit_vocabulary(raw.float(), plan.vocabulary), raw)
        if plan.keeps_probs:
            probs.append(logits.softmax(dim=-1))
        if numbers.drafting is not None:
            token, peak = race(probs[-1], numbers.drafting[i]), probs[-1][:, 0]
        else:
            peak, token = logits.max(dim=-1)
        tokens.append(token)
        peaks.append(peak)
        feed, starts = token[:, None], state.held + 1 + i
    ids = torch.stack(tokens, dim=1)  # (B, γ)
    ended = torch.isin(ids, state.ends).long().cumsum(dim=1)
    return Draft(
        ids,
        torch.minimum(1 + (ended == 0).sum(dim=1), state.limits),
        state.order,
        plan.gamma,
        plan.sampling,
        probs=torch.stack(probs, dim=1) if probs else None,
        peaks=torch.stack(peaks, dim=1),
    )


def verify(target: Block, draft: Draft, processors: Any, state: State) -> Verified:
    """The target's distributions over each row's last token and its draft."""
    logits = run_block(target, torch.cat([state.last[:, 1:], draft.tokens], dim=1), state.held).float()
    batch, width, size = logits.shape
    if processors:
        logits = processors(draft.tokens[:, :0].repeat_interleave(width, dim=0), logits.reshape(-1, size))
    return Verified(Selection(draft, draft.lengths, sends_all=True), logits.view(batch, width, size))


def _processed(processors: Any, logits: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """(B, V): what the call's processors make of the draft's logits; a draft that lacks token ids keeps one at least."""
    out = processors(logits.new_zeros(len(logits), 0, dtype=torch.long), logits) if processors else logits
    return something(out, logits) if raw.shape[-1] < logits.shape[-1] else out
