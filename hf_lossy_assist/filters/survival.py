"""The survival of drafted tokens: a logistic model of acceptance, fitted online with exponentially decayed evidence.

Everything is a small tensor operation on the draft's device: nothing here waits for the device or uploads to it.
"""

import torch

from ..round import Draft
from ..stops.cost_model import KEEP


PRIOR = (
    0.0,
    1.0,
    0.0,
    0.0,
)  # weights before any evidence: a token is accepted as often as the draft's probability says
STIFF = 4.0  # precision of the prior, for each weight
MOST = 4.0  # bound on the log-odds of the draft's largest probability
PLACES = 4.0  # unit of a token's place in its block


def describe(draft: Draft) -> torch.Tensor:
    """Describe each drafted token before it is drawn, (B, γ, 4) float32.

    The features are 1, the log-odds of the draft's largest probability, the place in the block, and whether the drafter is certain
    (a drafter without distributions always is). In greedy decoding the largest probability is that of the drafted token. On the demo's pair,
    entropy and the margin over the second token foretold no more, nor did the confidence head of its DSpark drafter.
    """
    shape, device = draft.tokens.shape, draft.tokens.device
    if draft.probs is None:
        odds = torch.full(shape, MOST, device=device)
        certain = torch.ones(shape, device=device)
    else:
        peak = draft.probs.amax(dim=-1)  # (B, γ)
        odds, certain = torch.logit(peak).nan_to_num(0.0).clamp(-MOST, MOST), (peak >= 1).float()
    slots = (torch.arange(shape[1], device=device) / PLACES).expand(shape)
    return torch.stack([torch.ones_like(odds), odds, slots, certain], dim=-1)


class Survival:
    """Estimates the acceptance of a drafted token if all tokens before it are accepted. The state is replaced, never modified.

    `weights` (4,) float32: of the features of `describe`. `precision` (4, 4) float32: of the weights, by Laplace's approximation. Each round
    a share of 1 − `KEEP` of the evidence is replaced by the prior.
    """

    def __init__(self, device: torch.device):
        self.prior = torch.tensor(PRIOR, device=device)
        self.ridge = STIFF * torch.eye(len(PRIOR), device=device)
        self.weights, self.precision = self.prior, self.ridge

    def of(self, features: torch.Tensor) -> torch.Tensor:
        """Return π, the probability that a token and all before it in its row are accepted, (B, γ, 4) → (B, γ)."""
        return (features @ self.weights).sigmoid().cumprod(dim=1)

    def learn(self, features: torch.Tensor, sent: torch.Tensor, accepted: torch.Tensor) -> None:
        """Learn from a round: `features` (B, γ, 4), and the numbers of verified and accepted tokens of each row, (B,) int64."""
        slot = torch.arange(features.shape[1], device=features.device)
        tested = (
            slot < torch.minimum(accepted + 1, sent)[:, None]
        ).float()  # nothing after a rejected token is tested
        x, tested, label = features.flatten(0, 1), tested.flatten(), (slot < accepted[:, None]).float().flatten()
        evidence = torch.lerp(self.ridge, self.precision, KEEP)
        score = x @ self.weights
        # Jaakkola & Jordan's bound on the curvature: a step never overshoots, however wrong the estimate was.
        half = score.abs().clamp_(min=1e-3) / 2
        bound = evidence + (x * (tested * half.tanh() / (4 * half))[:, None]).T @ x
        pull = (1 - KEEP) * STIFF * (self.prior - self.weights)
        gradient = pull + x.T @ (tested * (label - score.sigmoid()))
        self.weights = self.weights + torch.linalg.solve_ex(bound, gradient)[0]
        chance = (x @ self.weights).sigmoid()
        self.precision = evidence + (x * (tested * chance * (1 - chance))[:, None]).T @ x


def cut(survival: torch.Tensor, lengths: torch.Tensor, token: float, column: float) -> torch.Tensor:
    """Return how many drafted tokens of each row to verify, (B,) int64.

    A row is cut before its first token with π < `token`, and all rows before the first column whose π add up to less than `column`.
    Whether a token is verified depends on the π of its place and of places before it, in any row, and on nothing later.

    Args:
        survival: π, (B, γ) float32, non-increasing in each row.
        lengths: (B,) int64.
        token, column: what a verified token costs, and what a column of tokens costs beyond that, in expected tokens.
    """
    there = torch.arange(survival.shape[1], device=lengths.device) < lengths[:, None]
    gain = (survival - token).masked_fill(~there, -1.0)
    pays = (gain >= 0) & (gain.clamp(min=0).sum(dim=0) >= column)
    return pays.long().cumprod(dim=1).sum(dim=1)
