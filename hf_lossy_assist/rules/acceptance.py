"""The end of a round: random numbers, the accepted prefix, and the token after it."""

from typing import Protocol

import torch

from ..round import BONUS_PLACE, Verdict, Verified
from ..tensors import at_places, refuse_unfit
from .base import RuleRun, Strict, overshoots


class RandomSource(Protocol):
    """The source of coins and sampled tokens (`batch.randomness.Randomness`)."""

    def coins(self, verified: Verified) -> torch.Tensor:
        """Return (B, γ) float32 in [0, 1)."""

    def draw(self, probs: torch.Tensor, row_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """Draw a token from each distribution (B, V), not necessarily normalised → (B,) int64. `slot`: its position in the round."""


def accept(run: RuleRun, verified: Verified, randomness: RandomSource) -> Verdict:
    """Accept a prefix of each row's sent tokens and choose the token after it.

    The coins are drawn before the rule runs: under one seed two rules see the same coins, and a looser rule accepts a superset.
    """
    if verified.decisions is None:
        coins = draw_coins(run, verified, randomness)
        runs, lossy = prefix(run, verified, coins)
    else:
        coins, runs, lossy = verified.decisions
    accepted, unchecked = runs.sum(dim=1), run.unchecked(verified, coins)
    if unchecked is not None:
        refuse_unfit(unchecked, runs.shape, torch.bool, run.rule, "unchecked")
    if verified.sampling:
        token = randomness.draw(next_distribution(run, verified, coins, accepted), verified.row_ids, BONUS_PLACE)
    else:
        token = next_token(run, verified, coins, accepted)
    overshoot = None if run.rule.lossless else overshoots(verified).masked_fill(~lossy, 0.0)
    verdict = Verdict(accepted, token, lossy, None if unchecked is None else unchecked & runs, coins, overshoot)
    run.observe(verified, verdict)
    return verdict


def draw_coins(run: RuleRun, verified: Verified, randomness: RandomSource) -> torch.Tensor | None:
    """Draw the coins of a round, (B, γ); None if the rule tosses none."""
    return randomness.coins(verified) if verified.sampling or run.rule.needs_coins else None


def prefix(run: RuleRun, verified: Verified, coins: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which drafted tokens are accepted, and which of them strict acceptance would reject, (B, γ) bool each."""
    by_rule = refuse_unfit(run.accepts(verified, coins), verified.tokens.shape, torch.bool, run.rule, "accepts")
    by_strict = by_rule if run.rule.lossless else Strict().accepts(verified, coins)
    if run.rule.accepts_all_strict:
        by_rule = by_rule | by_strict
    runs = (by_rule & verified.is_sent).long().cumprod(dim=1).bool()  # up to the first rejection
    return runs, runs & ~by_strict


def next_token(run: RuleRun, verified: Verified, coins: torch.Tensor | None, accepted: torch.Tensor) -> torch.Tensor:
    """Return the token after the `accepted` (B,) ones in greedy decoding, (B,) int64."""
    bonus = verified.argmax[torch.arange(accepted.shape[0], device=accepted.device), accepted]
    gamma = verified.draft.gamma
    if gamma == 0:
        return bonus
    choice = refuse_unfit(
        run.choice(verified, coins, accepted.clamp(max=gamma - 1)), bonus.shape, torch.int64, run.rule, "choice"
    )
    return torch.where(accepted < verified.sent, choice, bonus)


def next_distribution(
    run: RuleRun, verified: Verified, coins: torch.Tensor | None, accepted: torch.Tensor
) -> torch.Tensor:
    """Return the distribution of the token after the `accepted` (B,) ones in sampling, (B, V) float32, not normalised."""
    gamma, bonus = verified.draft.gamma, verified.p_at(accepted)
    if gamma == 0:
        return bonus
    at, rejected = accepted.clamp(max=gamma - 1), accepted < verified.sent
    residual, would_verify = run.correction(verified, coins, at), verified.selection.would_verify
    refuse_unfit(residual, bonus.shape, bonus.dtype, run.rule, "correction")
    if would_verify is not None:
        # A filter that depends on the drafted token: r = norm(p − v·min(p, q)), also at a token that it dropped.
        assert verified.q is not None, "a filter compares distributions of the draft"
        verifies = refuse_unfit(would_verify(at), bonus.shape, torch.bool, verified.selection, "would_verify")
        either = torch.minimum(verified.p_at(at), at_places(verified.q, at))
        residual, rejected = residual + either.masked_fill(verifies, 0.0), accepted < verified.drafted
    # Where p ≈ q, rounding can leave an all-zero residual; the token is then drawn from p, as in exact arithmetic.
    use = rejected & (residual.sum(dim=1) > 0)
    return torch.where(use[:, None], residual, bonus)
