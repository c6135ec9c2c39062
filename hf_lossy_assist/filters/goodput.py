"""Choose the drafted tokens of a batch to verify by expected tokens per second, greedily one token at a time.

Kim et al., "Speculative Verification" (§5, huggingface.co/papers/2509.24328). A row's i-th drafted token adds π_i = P̂_1 ⋯ P̂_i to
the expected accepted tokens, so the next best token of a batch is the one with the highest π in any row. Tokens are added while
expected tokens ÷ seconds increases. Whether a token is added never depends on later tokens of its row.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..round import Draft


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
        before = np.concatenate([np.ones((batch, 1)), self.gains], axis=1)[
            rows[:, 0], at
        ]  # (B,) π of the token before
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
