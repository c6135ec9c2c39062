"""How a round ends: coins, the accepted prefix, and the token after it."""

import torch

from ..round import Block, Verdict
from .base import AcceptanceRule, Strict, draw, inside_of, kept_of


def decide(rule: AcceptanceRule, block: Block) -> Verdict:
    """Accept a prefix of each row's kept tokens and choose the token after it.

    The coins are drawn before the rule is asked, so two rules with one seed see the same coins and a looser rule accepts
    a superset. A lossy rule takes the union with strict acceptance, unless it says otherwise (`AcceptanceRule.joined`).
    """
    if block.sampling:
        block.coins = torch.rand(block.tokens.shape, dtype=torch.float32, device=block.tokens.device)
    runs, lossy = prefix(rule, block)
    accepted, unseen = runs.sum(dim=1), rule.unseen(block)
    token = draw(following(rule, block, accepted)) if block.sampling else chosen(rule, block, accepted)
    return Verdict(accepted, token, lossy, None if unseen is None else unseen & runs)


def prefix(rule: AcceptanceRule, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafted tokens are accepted, and which of them only because of the rule, (B, γ) bool each."""
    by_rule = rule.accepts(block)
    by_strict = by_rule if rule.lossless else Strict().accepts(block)
    if rule.joined:
        by_rule = by_rule | by_strict
    runs = (by_rule & inside_of(block)).long().cumprod(dim=1).bool()  # up to the first rejection
    return runs, runs & ~by_strict


def chosen(rule: AcceptanceRule, block: Block, accepted: torch.Tensor) -> torch.Tensor:
    """Greedy: the token after the accepted ones, (B,) int64."""
    bonus = block.best[torch.arange(accepted.shape[0], device=accepted.device), accepted]
    gamma = block.tokens.shape[1]
    if gamma == 0:
        return bonus
    return torch.where(accepted < kept_of(block), rule.choice(block, accepted.clamp(max=gamma - 1)), bonus)


def following(rule: AcceptanceRule, block: Block, accepted: torch.Tensor) -> torch.Tensor:
    """Sampling: the law of the token after the accepted ones, (B, V) float32, not normalised."""
    gamma, rows = block.tokens.shape[1], torch.arange(accepted.shape[0], device=accepted.device)
    if gamma == 0:
        return block.p[:, 0]
    law, at, rejected = block.p[rows, accepted], accepted.clamp(max=gamma - 1), accepted < kept_of(block)
    residual = rule.correction(block, at)
    if block.considered is not None:
        # A filter that looked at the drafted token itself: r = norm(p − v·min(p, q)), at a token that it dropped as well.
        assert block.q is not None
        either = torch.minimum(block.p[rows, at], block.q[rows, at])
        residual, rejected = residual + either.masked_fill(block.considered(at), 0.0), accepted < block.drafted
    # Rounding can leave a residual of all zeros where p ≈ q; the token is then drawn from p, as it would be with exact numbers.
    use = rejected & (residual.sum(dim=1) > 0)
    return torch.where(use[:, None], residual, law)
