"""What every acceptance rule answers: which drafted tokens to keep, and from what to draw the token after them.

One formalism for all (docs/explanation/what-is-lossy.md): a drafted token x ~ q is accepted with probability a(x), and after the first rejection
the correction comes from a law r. The output law is then q·a + (1 − Σ q·a)·r. A rule of your own overrides `matches`
(greedy) and `probability` (sampling), and `correction` where its law is not the lossless one; rules that are one formula of
the two laws are shorter as `pointwise.Pointwise`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..registry import register_rule
from ..round import Block, Verdict


def draw(law: torch.Tensor) -> torch.Tensor:
    """One token from each law (..., V) → (...), by the exponential race: no host synchronisation, and NaN raises nothing here."""
    return (law / torch.empty_like(law).exponential_()).argmax(dim=-1)


@dataclass(frozen=True)
class AcceptanceRule:
    """The base of every rule, and the lossless one.

    Greedy: accept x iff x = argmax p. Sampling: a(x) = min(1, p(x)/q(x)), r = norm((p − q)⁺)
    (Leviathan et al., Algorithm 1, huggingface.co/papers/2211.17192).
    """

    lossless: ClassVar[bool] = True
    joined: ClassVar[bool] = (
        True  # what strict acceptance takes is taken too, under the same coins; False: this rule alone
    )
    modes: ClassVar[tuple[str, ...]] = ("greedy", "sampling")  # of decoding, in which its source defines it
    needs_laws: ClassVar[bool] = False  # reads q over the whole vocabulary, in greedy decoding too
    nestable: ClassVar[bool] = True  # makes sense inside `Union` and `Limited`
    features: ClassVar[FeatureSpec | None] = None  # what `judge` is given, if the rule has a head

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        """What the rule's head says of each drafted token, (B, γ, H) → (B, γ) bool; the engine puts it into `block.judged`."""
        raise NotImplementedError(f"{type(self).__name__} has features, and so needs a method judge(features)")

    def start(self, prompts: Sequence[torch.Tensor]) -> "AcceptanceRule":
        """What one generate call works with. A rule that keeps count during the call returns a fresh copy, so no state leaks.

        `prompts`: the tokens of each row of the call, without padding, (n,) each.
        """
        return self

    def observe(self, block: Block, verdict: Verdict) -> None:
        """Told after each round what was decided. `block.rows` says which rows of the call it was about."""

    def matches(self, block: Block) -> torch.Tensor:
        """Greedy: which drafted tokens to accept, (B, γ) bool."""
        return block.tokens == block.best[:, : block.tokens.shape[1]]

    def probability(self, block: Block) -> torch.Tensor:
        """Sampling: a(x) of each drafted token, (B, γ) float32 in [0, 1]."""
        p = block.of_tokens(block.p)
        return p.clamp(max=1.0) if block.q is None else (p / block.of_tokens(block.q)).clamp(max=1.0)

    def accepts(self, block: Block) -> torch.Tensor:
        """Which drafted tokens to accept once all before them are, (B, γ) bool; in sampling by the coins in `block.coins`.

        For rules that decide about several tokens together; what they say behind a rejected token has no effect.
        """
        if not block.sampling:
            return self.matches(block)
        assert block.coins is not None, "no coin has been tossed for this block yet"
        return block.coins < self.probability(block)

    def unseen(self, block: Block) -> torch.Tensor | None:
        """Drafted tokens that this rule accepts without a look at p, (B, γ) bool; None: it looks at all."""
        return None

    def choice(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        """Greedy: the token that takes the place of the rejected one at `at` (B,) of each row, (B,) int64."""
        return block.best[torch.arange(at.shape[0], device=at.device), at]

    def correction(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        """Sampling: r at the rejected position `at` (B,) of each row, (B, V) float32, not normalised."""
        rows = torch.arange(at.shape[0], device=at.device)
        p = block.p[rows, at]
        if block.q is None:  # q = 1 on the drafted token: (p − q)⁺ is p without that token
            return p.scatter(1, block.tokens[rows, at][:, None], 0.0)
        return (p - block.q[rows, at]).clamp(min=0.0)

    def check_mode(self, sampling: bool) -> None:
        """Refuse a kind of decoding in which the rule's source does not define it."""
        if ("sampling" if sampling else "greedy") not in self.modes:
            raise ValueError(
                f"{type(self).__name__} is defined for {' and '.join(self.modes)} decoding alone, and this call has "
                f"do_sample={sampling}: pass do_sample={not sampling}, or choose another rule"
            )


@dataclass(frozen=True)
class Strict(AcceptanceRule):
    """Lossless acceptance: the output has exactly the target's law. It has no parameter; it is what others are neutral to."""


def taken(rule: AcceptanceRule, block: Block) -> torch.Tensor:
    """What `rule` accepts, joined with strict acceptance where the rule asks for it, (B, γ) bool."""
    own = rule.accepts(block)
    return own if rule.lossless or not rule.joined else own | Strict().accepts(block)


def kept_of(block: Block) -> torch.Tensor:
    """How many drafted tokens of each row the target reads, (B,) int64."""
    return block.drafted if block.kept is None else block.kept


def inside_of(block: Block) -> torch.Tensor:
    """Which places hold a drafted token that the target reads, (B, γ) bool."""
    kept = kept_of(block)
    return torch.arange(block.tokens.shape[1], device=kept.device) < kept[:, None]


register_rule(
    "strict", Strict, guarantee="lossless", paper="2211.17192",
    summary="Lossless acceptance: the output has exactly the target's law.",
)  # fmt: skip
