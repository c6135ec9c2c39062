"""The base class of acceptance rules, and the two lossless ones.

All rules share one formalism (docs/explanation/what-is-lossy.md): a drafted token x ~ q is accepted with probability a(x). After the first
rejection the correction is drawn from r, so that the output distribution is q·a + (1 − Σ q·a)·r. A rule overrides `matches` (greedy) and
`probability` (sampling), and `correction` if r is not norm((p − q)⁺). A single formula of p and q is shorter as a `pointwise.Pointwise`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..registry.frozen import Frozen
from ..round import Verdict, Verified
from ..tensors import argmax, at_places, in_parts, refuse_unfit


SCOPES = ("position", "prefix", "block")


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw one token from each distribution (..., V) → (...) int64, by the exponential race: no device sync, and no error for NaN."""
    return race(probs, torch.empty_like(probs).exponential_(generator=generator))


def race(probs: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """Return the winner of each race, given (..., V) probabilities and (..., V) exponential random numbers → (...) int64."""
    return argmax(probs / exponentials)


def ratios(verified: Verified) -> torch.Tensor:
    """Return p(x)/q(x) of each drafted token, (B, γ)."""
    p = verified.p_at_tokens
    return p if verified.q is None else p / verified.at_tokens(verified.q)


def overshoots(verified: Verified) -> torch.Tensor:
    """Return q(x)/p(x) of each drafted token, (B, γ): by how much a rule that takes it for certain makes it likelier than the target does.

    Greedy drafts are certain, q = 1. Finite, also where p = 0.
    """
    p = verified.p_at_tokens.clamp(min=torch.finfo(torch.float32).tiny)
    if verified.q is None or not verified.sampling:
        return p.reciprocal()
    return verified.at_tokens(verified.q) / p


def above_draft(p: torch.Tensor, verified: Verified, at: torch.Tensor) -> torch.Tensor:
    """Return (p − q)⁺ at position `at` (B,) of each row, (B, V); overwrites `p` (B, V)."""
    if verified.q is None:  # q = 1 on the drafted token: (p − q)⁺ is p without that token
        return p.scatter(1, verified.tokens.gather(1, at[:, None]), 0.0)
    return p.sub_(at_places(verified.q, at)).clamp_(min=0.0)


@dataclass(frozen=True)
class AcceptanceRule(Frozen, kind="rule"):
    """The settings of a rule, and the base of every rule; state during a call belongs to `RuleRun`. The defaults are strict acceptance.

    Greedy: accept x iff x = argmax p. Sampling: a(x) = min(1, p(x)/q(x)), r = norm((p − q)⁺)
    (Leviathan et al., Algorithm 1, huggingface.co/papers/2211.17192).
    """

    lossless: ClassVar[bool] = False  # the output has exactly the target's distribution, whatever the parameters
    accepts_all_strict: ClassVar[bool] = True  # also what strict acceptance would with the same coins
    modes: ClassVar[tuple[str, ...]] = ("greedy", "sampling")  # for which the rule is defined
    needs_draft_probs: ClassVar[bool] = False  # reads q over the whole vocabulary, in greedy decoding, too
    needs_coins: ClassVar[bool] = False  # draws coins in greedy decoding, too
    trusts_stop: ClassVar[bool] = False  # accepts tokens unchecked if the draft stop did not reject them
    nestable: ClassVar[bool] = True  # may be used inside `Union` and `Limited`
    features: ClassVar[FeatureSpec | None] = None  # the hidden states that `judge` reads, for a rule with a head
    # What a decision depends on: one "position" (its p, q and coin), the "prefix" up to it, or the whole "block", which is assumed
    # of a subclass that overrides `accepts` or `start`; "prefix" of one that overrides `matches` or `probability`.
    scope: ClassVar[str] = "prefix"

    def __init_subclass__(cls, **keywords: Any) -> None:
        changed = vars(cls).keys() & {"scope", "accepts", "start", "matches", "probability"}
        if changed and "scope" not in changed:
            cls.scope = "block" if changed & {"accepts", "start"} else "prefix"
        super().__init_subclass__(**keywords)  # registers the class

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        """Return which drafted tokens the rule's head accepts, (B, γ, H) → (B, γ) bool: the round's `Verified.head_accepts`."""
        raise NotImplementedError(f"{type(self).__name__} has features, and so needs a method judge(features)")

    def start(self, prompts: Sequence[torch.Tensor]) -> "RuleRun":
        """Return the run of one generate call. `prompts`: each row's tokens without padding, (n,) int64."""
        return RuleRun(self)

    def matches(self, verified: Verified) -> torch.Tensor:
        """Return which drafted tokens to accept in greedy decoding, (B, γ) bool."""
        return verified.tokens == verified.argmax[:, : verified.draft.gamma]

    def probability(self, verified: Verified) -> torch.Tensor:
        """Return a(x) of each drafted token in sampling, (B, γ) float32 in [0, 1]."""
        return ratios(verified).clamp(max=1.0)

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        """Return which drafted tokens to accept if all before them are, (B, γ) bool. `coins` (B, γ) in [0, 1): None in greedy decoding.

        Override it to decide on several tokens jointly. Answers after a rejected token have no effect.
        """
        if not verified.sampling:
            return self.matches(verified)
        assert coins is not None
        chances = self.probability(verified)
        return coins < refuse_unfit(chances, coins.shape, verified.logits.dtype, self, "probability")

    def unchecked(self, verified: Verified) -> torch.Tensor | None:
        """Return the drafted tokens that are accepted without a comparison with p, (B, γ) bool; None: none are."""
        return None

    def choice(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        """Return the token that replaces the rejected one at position `at` (B,) of each row in greedy decoding, (B,) int64."""
        return verified.argmax[torch.arange(at.shape[0], device=at.device), at]

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        """Return r at the rejected position `at` (B,) of each row in sampling, (B, V) float32, not normalised."""
        return above_draft(verified.p_at(at), verified, at)

    def check_mode(self, sampling: bool) -> None:
        """Raise `ValueError` for a decoding mode for which the rule is not defined."""
        if ("sampling" if sampling else "greedy") not in self.modes:
            raise ValueError(
                f"{type(self).__name__} is defined for {' and '.join(self.modes)} decoding alone, and this call has "
                f"do_sample={sampling}: pass do_sample={not sampling}, or choose another rule"
            )


class RuleRun:
    """The state of a rule in one generate call; shapes as in the rule's methods. This class has no state; stateful rules subclass it."""

    def __init__(self, rule: AcceptanceRule):
        self.rule = rule

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return self.rule.accepts(verified, coins)

    def unchecked(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor | None:
        return self.rule.unchecked(verified)

    def choice(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        return self.rule.choice(verified, at)

    def correction(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        return self.rule.correction(verified, at)

    @property
    def keeps_state(self) -> bool:
        """Whether decisions depend on earlier rounds. Such a run may sync with the device, and its rounds are not compiled."""
        return type(self).observe is not RuleRun.observe

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        """Record a round's verdict about the rows `verified.row_ids` of the call."""

    def take(self, row: int, other: "RuleRun") -> None:
        """Replace the state of `row` by that of row 0 of `other`, the run of a single-row call. A run with state for each row overrides this."""


class Strict(AcceptanceRule, name="strict", paper="2211.17192"):
    """Lossless acceptance: the output has exactly the target's distribution."""

    lossless: ClassVar[bool] = True
    scope: ClassVar[str] = "position"


class BlockVerification(AcceptanceRule, name="block_verification", paper="2403.10444"):
    """Accept whole blocks losslessly: at least as many tokens in expectation as token-by-token acceptance.

    With w₀ = 1, wᵢ = min(1, wᵢ₋₁·p(xᵢ)/q(xᵢ)): accept the longest i whose coin is below hᵢ = Sᵢ/(Sᵢ + 1 − wᵢ), Sᵢ = Σ (wᵢ·p − q)⁺
    after xᵢ, and h = w for the last drafted token; r = norm((wᵢ·p − q)⁺) (Sun et al., Algorithm 2,
    huggingface.co/papers/2403.10444). P(at least i accepted | x₁ … xᵢ) = wᵢ is at least strict acceptance's; a single outcome may still
    be shorter, since a later token's coin decides for earlier ones. Greedy: strict.
    """

    lossless: ClassVar[bool] = True
    nestable: ClassVar[bool] = False  # its correction depends on its decisions
    accepts_all_strict: ClassVar[bool] = False

    def weights(self, verified: Verified) -> torch.Tensor:
        """Return w before the first and after each drafted token, (B, γ + 1)."""
        ratio = ratios(verified)
        out = [ratio.new_ones(ratio.shape[0])]
        for column in ratio.unbind(dim=1):
            out.append((out[-1] * column).clamp(max=1.0))
        return torch.stack(out, dim=1)

    def probability(self, verified: Verified) -> torch.Tensor:
        """Return h of each drafted token, whose coin accepts the prefix that ends with it, (B, γ)."""
        w, gamma = self.weights(verified)[:, 1:], verified.draft.gamma
        if gamma == 0:
            return w
        if verified.q is None:
            rest = w[:, :-1] * (1 - verified.p_at_tokens[:, 1:])  # q = 1 on the next token, where w·p − 1 ≤ 0
        else:
            rest = in_parts(_above, verified.logits[:, 1:gamma], verified.q[:, 1:], w[:, :-1])
        # 0/0: the distributions agree and w = 1, so nothing after it can be rejected. After an impossible token p may be undefined.
        inner = (rest / (rest + 1 - w[:, :-1])).nan_to_num(1.0).masked_fill(~(w[:, :-1] > 0), 0.0)
        h = torch.cat([inner, w[:, -1:]], dim=1)
        last = torch.arange(gamma, device=w.device) == verified.sent[:, None] - 1
        return torch.where(last, w, h)

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        if not verified.sampling:
            return self.matches(verified)
        passed = super().accepts(verified, coins) & verified.is_sent
        return passed.flip(1).cummax(dim=1).values.flip(1)  # the prefix up to the last one that passed

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        return above_draft(self.weights(verified).gather(1, at[:, None]) * verified.p_at(at), verified, at)


def _above(logits: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return Σ (w·p − q)⁺, (B, n, V) each and (B, n) → (B, n)."""
    return logits.softmax(dim=-1).mul_(w[..., None]).sub_(q).clamp_(min=0.0).sum(dim=-1)


def accepted_by(run: RuleRun, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
    """Return what a rule accepts, OR-ed with strict acceptance if `accepts_all_strict`, (B, γ) bool."""
    accepted = refuse_unfit(run.accepts(verified, coins), verified.tokens.shape, torch.bool, run.rule, "accepts")
    if run.rule.lossless or not run.rule.accepts_all_strict:
        return accepted
    return accepted | Strict().accepts(verified, coins)
