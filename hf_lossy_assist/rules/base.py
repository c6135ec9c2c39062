"""What every acceptance rule answers: which drafted tokens to accept, and from which distribution to draw the token after them.

One formalism for all (docs/explanation/what-is-lossy.md): a drafted token x ~ q is accepted with probability a(x), and after the first rejection
the correction is drawn from a distribution r. The output distribution is then q·a + (1 − Σ q·a)·r. A rule of your own overrides
`matches` (greedy) and `probability` (sampling), and `correction` where r is not the lossless one; rules that are one formula of p and q
are shorter as `pointwise.Pointwise`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..registry import NoDeepCopy, register_rule, set_base
from ..round import Verdict, Verified
from ..vocabulary import argmax, at_places


def draw(probs: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token from each distribution (..., V) → (...) int64, by the exponential race.

    It needs no device sync, and NaN raises nothing here.
    """
    return race(probs, torch.empty_like(probs).exponential_(generator=generator))


def race(probs: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """The token that comes first in each race, (..., V) and (..., V) exponentially distributed → (...) int64."""
    return argmax(probs / exponentials)


@dataclass(frozen=True)
class AcceptanceRule(NoDeepCopy):
    """The base of every rule; what it does not override is strict acceptance. Settings only: what a rule counts during a call stands in
    its `RuleRun`.

    What a subclass says of itself, as class attributes:

    - `lossless`: the output has exactly the target's distribution, whatever the parameters are. False unless it says so.
    - `accepts_all_strict`: what it accepts is OR-ed with strict acceptance, under the same coins (True). False: what it accepts is all.
    - `modes`: of decoding, in which it is defined: ("greedy", "sampling").
    - `needs_draft_probs`: it reads q over the whole vocabulary, in greedy decoding too, where nobody keeps it else.
    - `needs_coins`: it tosses coins in greedy decoding too.
    - `trusts_stop`: it accepts unchecked what the draft stop did not doubt.
    - `nestable`: it makes sense inside `Union` and `Limited`.
    - `features` (`FeatureSpec`): the hidden states that `judge` is given.

    Greedy: accept x iff x = argmax p. Sampling: a(x) = min(1, p(x)/q(x)), r = norm((p − q)⁺)
    (Leviathan et al., Algorithm 1, huggingface.co/papers/2211.17192).
    """

    lossless: ClassVar[bool] = False  # the output has exactly the target's distribution, whatever the parameters are
    # OR-ed with strict acceptance, under the same coins. False: what this rule accepts is all.
    accepts_all_strict: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("greedy", "sampling")  # of decoding, in which the rule's source defines it
    needs_draft_probs: ClassVar[bool] = False  # reads q over the whole vocabulary, in greedy decoding too
    needs_coins: ClassVar[bool] = False  # tosses coins in greedy decoding too
    trusts_stop: ClassVar[bool] = False  # accepts unchecked what the draft stop did not doubt
    nestable: ClassVar[bool] = True  # makes sense inside `Union` and `Limited`
    features: ClassVar[FeatureSpec | None] = None  # what `judge` is given, if the rule has a head

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        """Which drafted tokens the rule's head accepts, (B, γ, H) → (B, γ) bool; the engine puts it into `head_accepts`."""
        raise NotImplementedError(f"{type(self).__name__} has features, and so needs a method judge(features)")

    def start(self, prompts: Sequence[torch.Tensor]) -> "RuleRun":
        """The rule at work in one generate call.

        `prompts`: the tokens of each row of the call, without padding, (n,) int64 each.
        """
        return RuleRun(self)

    def matches(self, verified: Verified) -> torch.Tensor:
        """Greedy: which drafted tokens to accept, (B, γ) bool."""
        return verified.tokens == verified.argmax[:, : verified.draft.gamma]

    def probability(self, verified: Verified) -> torch.Tensor:
        """Sampling: a(x) of each drafted token, (B, γ) float32 in [0, 1]."""
        p = verified.p_at_tokens
        return p.clamp(max=1.0) if verified.q is None else (p / verified.at_tokens(verified.q)).clamp(max=1.0)

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        """Which drafted tokens to accept once all before them are, (B, γ) bool. `coins` (B, γ) in [0, 1): None in greedy decoding.

        For rules that decide about several tokens together; what they answer behind a rejected token has no effect.
        """
        if not verified.sampling:
            return self.matches(verified)
        assert coins is not None
        return coins < self.probability(verified)

    def unchecked(self, verified: Verified) -> torch.Tensor | None:
        """Drafted tokens that this rule accepts without comparing them with p, (B, γ) bool; None: it compares all."""
        return None

    def choice(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        """Greedy: the token that takes the place of the rejected one at `at` (B,) of each row, (B,) int64."""
        return verified.argmax[torch.arange(at.shape[0], device=at.device), at]

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        """Sampling: r at the rejected position `at` (B,) of each row, (B, V) float32, not normalised."""
        p = verified.p_at(at)
        if verified.q is None:  # q = 1 on the drafted token: (p − q)⁺ is p without that token
            return p.scatter(1, verified.tokens.gather(1, at[:, None]), 0.0)
        return p.sub_(at_places(verified.q, at)).clamp_(min=0.0)

    def check_mode(self, sampling: bool) -> None:
        """Refuse a kind of decoding in which the rule's source does not define it."""
        if ("sampling" if sampling else "greedy") not in self.modes:
            raise ValueError(
                f"{type(self).__name__} is defined for {' and '.join(self.modes)} decoding alone, and this call has "
                f"do_sample={sampling}: pass do_sample={not sampling}, or choose another rule"
            )


class RuleRun:
    """A rule at work in one generate call. This one keeps no state; rules that count have a subclass.

    `coins` (B, γ) in [0, 1), None in greedy decoding, are those of the round.
    """

    def __init__(self, rule: AcceptanceRule):
        self.rule = rule

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        """Decide which drafted tokens are accepted; shapes as in `AcceptanceRule.accepts`."""
        return self.rule.accepts(verified, coins)

    def unchecked(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor | None:
        """Tell which accepted tokens were not verified; shapes as in `AcceptanceRule.unchecked`."""
        return self.rule.unchecked(verified)

    def choice(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        """Choose the token after a rejection in greedy decoding; shapes as in `AcceptanceRule.choice`."""
        return self.rule.choice(verified, at)

    def correction(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        """Return the distribution after a rejection; shapes as in `AcceptanceRule.correction`."""
        return self.rule.correction(verified, at)

    @property
    def keeps_state(self) -> bool:
        """Whether what it decides depends on earlier rounds; it may then look at values, and its rounds are not compiled whole."""
        return type(self).observe is not RuleRun.observe

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        """Told after each round what was decided; `verified.row_ids` says about which rows of the call."""

    def take(self, row: int, other: "RuleRun") -> None:
        """Told that another text takes the place of `row`: what is kept for it is from now on what `other`, the run of a call with that text
        alone, keeps for its row 0. A run that keeps something for each row overrides this.
        """


@dataclass(frozen=True)
class Strict(AcceptanceRule):
    """Lossless acceptance: the output has exactly the target's distribution. It has no parameter; it is what others are neutral to."""

    lossless: ClassVar[bool] = True


def accepted_by(run: RuleRun, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
    """What a rule accepts, OR-ed with strict acceptance where the rule asks for it, (B, γ) bool."""
    own = run.accepts(verified, coins)
    if run.rule.lossless or not run.rule.accepts_all_strict:
        return own
    return own | Strict().accepts(verified, coins)


set_base("rule", AcceptanceRule)
register_rule(
    "strict", Strict, guarantee="lossless", paper="2211.17192",
    summary="Lossless acceptance: the output has exactly the target's distribution.",
)  # fmt: skip
