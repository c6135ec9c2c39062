"""The verify filter of SV: a companion model predicts which drafted tokens are worth verifying.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328); the exact correction is ours (docs/explanation/sv-exactness.md).
The tokens of a batch to verify are chosen by expected tokens per second (§5): a row's i-th drafted token adds π_i = P̂_1 ⋯ P̂_i to the expected
accepted tokens, so the next best token of a batch has the highest π. Tokens are added while expected tokens ÷ seconds increases. Whether a token is added never depends on later tokens of its row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.sv_profile import Profile
from ..models.introspection import base_of
from ..round import Draft, Selection
from ..rules.acceptance import RandomSource
from .base import CompanionFilter


Exactness = Literal["full", "prefix", "off"]


class SVFilter(
    CompanionFilter,
    name="sv",
    condition='lossless; lossy in sampling with exact="off"',
    neutral={"exact": "full"},
    paper="2509.24328",
    neutral_text='any but exact="off"',
    example={"profile": "folder or org/name", "companion": "folder or org/name"},
):
    """Verify a row's i-th drafted token if that is expected to give more tokens per second.

    Args:
        profile (`Profile`): from `hf-lossy profile`.
        companion (`PreTrainedModel` or `str`): the model that the profile was made with; see `CompanionFilter`.
        exact: how sampling stays exact, since dropping x because of its A and then drawing from p would favour the other tokens. "full":
            the correction is drawn from norm(p − v·min(p, q)), v(x) = 1 where x would have been verified; rows of a common round are not
            quite independent of each other. "prefix": a token is dropped only for S and earlier tokens. "off": the paper's form,
            **lossy** in sampling. Greedy decoding is lossless in each.
        corrections: also count the token that every round gives; False is the paper's goodput.
        fallback: run without companion and filter in batches for which the profile predicts that they do not pay.
    """

    profile: Profile
    companion: PreTrainedModel = field(repr=False)  # a model's repr has many lines
    exact: Exactness = "full"
    corrections: bool = True
    fallback: bool = True
    joint: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.exact != "off"

    @property
    def depends_on_token(self) -> bool:  # type: ignore[override]
        return self.exact != "prefix"

    def check(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
    ) -> None:
        self.profile.check_length(longest)
        super().check(target, draft, tokenizer, longest)
        self.profile.check(target, draft, self.companion_for(base_of(target)), tokenizer)

    def check_decoding(self, decoding: Mapping[str, object]) -> None:
        self.profile.check_decoding(decoding)

    def reads_companion(self, rows: int) -> bool:
        return not self.fallback or self.profile.worthwhile(rows)

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        if companion is None or draft.gamma == 0:
            return Selection(draft, draft.lengths, companion=companion)
        q = probs_of(draft)
        bins, (batch, gamma) = self.profile.bins, draft.tokens.shape
        s, a = similarity(draft, companion), acceptance(draft, companion)  # (B, γ) each
        cell = bins.of_s(s)
        by_s, table = bins.tables(cell.device)
        accept = by_s[cell] if self.exact == "prefix" else table[cell, bins.of_a(cell, a[..., None])[..., 0]]
        accept = accept.masked_fill(torch.arange(gamma, device=cell.device) >= draft.lengths[:, None], 0.0)
        # The cost must be known before the round: the final draft length depends on the tokens themselves.
        seconds = self.profile.latency.of(batch, draft.planned)
        sure = float((draft.lengths > 0).sum()) if self.corrections else 0.0
        choice = choose(accept.cpu().numpy(), seconds, sure)
        would_verify = None
        if self.exact == "full" and draft.sampling:
            would_verify = partial(self._would_verify, companion, q, choice, cell)
        sent = torch.from_numpy(choice.counts).to(cell.device)
        return Selection(draft, sent, companion=companion, would_verify=would_verify)

    def _would_verify(
        self, companion: torch.Tensor, q: torch.Tensor, choice: "Schedule", cell: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return v: which tokens would have been verified at position `at` (B,) of each row, (B, V) bool."""
        bins, rows = self.profile.bins, torch.arange(at.shape[0], device=at.device)
        cells = cell[rows, at]  # (B,)
        verified = choice.would_verify(at.cpu().numpy(), bins.accept[cells.cpu().numpy()])  # (B, L)
        a = ratio(companion[rows, at], q[rows, at])  # (B, V)
        return torch.from_numpy(verified).to(at.device).gather(1, bins.of_a(cells, a))


@dataclass(frozen=True)
class Schedule:
    """The tokens of a round to verify, and the choice if one token were another (`would_verify`)."""

    gains: np.ndarray  # (B, γ) float64   π of each drafted token
    seconds: np.ndarray  # (> B·γ,) float64   of a round that verifies m tokens
    sure: float  # tokens that the round gives without accepted drafts: the corrections
    order: np.ndarray  # (B·γ,) int64    the tokens as b·γ + i, best first
    counts: np.ndarray  # tokens of each row to verify

    def would_verify(self, at: np.ndarray, accept: np.ndarray) -> np.ndarray:
        """Return whether row b's token at position `at[b]` would be verified if its expected acceptance were `accept[b, k]`.

        The row's earlier tokens and the other rows stay unchanged. (B, K) float64 → (B, K) bool.
        """
        batch, gamma = self.gains.shape
        rows = np.arange(batch)[:, None]
        before = np.pad(self.gains, ((0, 0), (1, 0)), constant_values=1.0)[rows[:, 0], at]  # (B,) π before the token
        gain = before[:, None] * accept  # (B, K)
        row, slot = self.order // gamma, self.order % gamma  # (n,)
        value = self.gains.reshape(-1)[self.order]
        counts = ~((row == rows) & (slot >= at[:, None]))  # (B, n) without the row's tokens from there on
        totals = _totals(np.where(counts, value, 0.0), self.sure)  # (B, n + 1)
        added = np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1)  # (B, n + 1)
        speed = totals / self.seconds[added]
        failed = counts & ~(speed[:, 1:] > speed[:, :-1])
        ended = np.where(failed.any(axis=1), failed.argmax(axis=1), len(value))[:, None]  # the item at which it stops
        # Items of `order` before the token: those with higher π, and ties of rows up to this one.
        first = np.searchsorted(-value, -gain, side="left")  # (B, K)
        level = np.cumsum(np.concatenate([[0], value[1:] < value[:-1]]))  # (n,) equal for equal π
        tied = (first < len(value)) & (value[np.minimum(first, len(value) - 1)] == gain)
        goal = level[np.minimum(first, len(value) - 1)] * batch + rows
        same = np.searchsorted(level * batch + row, goal, side="right")
        ahead = np.where(tied, same, first)
        total, count = totals[rows, ahead], added[rows, ahead]
        return (ended >= ahead) & ((total + gain) / self.seconds[count + 1] > total / self.seconds[count])


def choose(accept: np.ndarray, seconds: np.ndarray, sure: float) -> Schedule:
    """Choose how many drafted tokens of each row to verify.

    Args:
        accept: P̂ of each drafted token, (B, γ) float64; 0 where a row drafted less.
        seconds: of a round that verifies m = 0, 1, … tokens of the whole batch, at least B·γ + 1 numbers, non-decreasing.
        sure: tokens that need no draft: the number of unfinished rows, or 0 as in the paper, which counts accepted drafts only.
    """
    batch, gamma = accept.shape
    gains = np.cumprod(accept, axis=1)
    order = np.argsort(-gains.reshape(-1), kind="stable")  # stable: a row's tokens keep their order
    totals = _totals(gains.reshape(1, -1)[:, order], sure)[0]  # (n + 1,)
    speed = totals / seconds[: len(totals)]
    rising = speed[1:] > speed[:-1]
    chosen = order[: len(order) if rising.all() else int(rising.argmin())]
    counts = np.bincount(chosen // max(gamma, 1), minlength=batch)
    return Schedule(gains, seconds, sure, order, counts)


def _totals(gains: np.ndarray, sure: float) -> np.ndarray:
    """Return the cumulative expected tokens, (B, n) → (B, n + 1), summed in order so that equal items give equal sums."""
    return np.cumsum(np.concatenate([np.full((gains.shape[0], 1), sure), gains], axis=1), axis=1)


def probs_of(draft: Draft) -> torch.Tensor:
    """Return q, (B, γ, V) float32. Raises: `ValueError` if the draft has none."""
    if draft.probs is None:
        raise ValueError("a companion is compared with the draft's distributions, and this draft has none")
    return draft.probs


def similarity(draft: Draft, companion: torch.Tensor) -> torch.Tensor:
    """Return S = Σ min(q, c) at each drafted position, (B, γ) float32 (Definition D.1)."""
    return torch.minimum(probs_of(draft), companion[:, : draft.gamma]).sum(dim=-1)


def acceptance(draft: Draft, companion: torch.Tensor) -> torch.Tensor:
    """Return A = min(1, c(x)/q(x)) of each drafted token, (B, γ) float32 (Definition D.2)."""
    return ratio(draft.at_tokens(companion), draft.at_tokens(probs_of(draft)))


def ratio(c: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return min(1, c/q); 1 for 0/0, where nothing is drafted."""
    return (c / q).nan_to_num(1.0).clamp(max=1.0)
