"""Acceptance rules: which drafted tokens to keep, and from what to draw the token after them.

One formalism for all (design §2): a drafted token x ~ q is accepted with probability a(x), and after the first rejection
the correction comes from a law r. The output law is then q·a + (1 − Σ q·a)·r. A rule of your own overrides `matches`
(greedy) and `probability` (sampling), and `correction` where its law is not the lossless one.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .block import Block, Verdict
from .errors import check_int, check_number
from .features import FeatureSpec
from .heads import Head


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
    features: ClassVar[FeatureSpec | None] = None  # what `judge` is given, if the rule has a head

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        """What the rule's head says of each drafted token, (B, γ, H) → (B, γ) bool; the engine puts it into `block.judged`."""
        raise NotImplementedError

    def matches(self, block: Block) -> torch.Tensor:
        """Greedy: which drafted tokens to accept, (B, γ) bool."""
        return block.tokens == block.best[:, : block.tokens.shape[1]]

    def probability(self, block: Block) -> torch.Tensor:
        """Sampling: a(x) of each drafted token, (B, γ) float32 in [0, 1]."""
        p = block.of_tokens(block.p)
        return p.clamp(max=1.0) if block.q is None else (p / block.of_tokens(block.q)).clamp(max=1.0)

    def unseen(self, block: Block) -> torch.Tensor | None:
        """Drafted tokens that this rule accepts without a look at p, (B, γ) bool; None: it looks at all."""
        return None

    def correction(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        """Sampling: r at the rejected position `at` (B,) of each row, (B, V) float32, not normalised."""
        rows = torch.arange(at.shape[0], device=at.device)
        p = block.p[rows, at]
        if block.q is None:  # q = 1 on the drafted token: (p − q)⁺ is p without that token
            return p.scatter(1, block.tokens[rows, at][:, None], 0.0)
        return (p - block.q[rows, at]).clamp(min=0.0)


@dataclass(frozen=True)
class Strict(AcceptanceRule):
    """Lossless acceptance: the output has exactly the target's law. It has no parameter; it is what others are neutral to."""


@dataclass(frozen=True)
class AllButLast(AcceptanceRule):
    """SPRINTER's rule: a row's drafted tokens are accepted unseen, all but the last, and that one strictly.

    a = 1 before the last drafted token, min(1, p/q) for it, r = norm((p − q)⁺) (Zhong et al., Algorithm 2,
    huggingface.co/papers/2502.04557). Meant for a draft stop that says when to doubt (`HeadStop`): the last token is then
    the doubted one. Neutral: one drafted token a round.
    """

    lossless: ClassVar[bool] = False

    def unseen(self, block: Block) -> torch.Tensor:
        kept = block.drafted if block.kept is None else block.kept
        return torch.arange(block.tokens.shape[1], device=kept.device) < kept[:, None] - 1

    def matches(self, block: Block) -> torch.Tensor:
        return self.unseen(block) | super().matches(block)

    def probability(self, block: Block) -> torch.Tensor:
        return super().probability(block).masked_fill(self.unseen(block), 1.0)


@dataclass(frozen=True)
class TopK(AcceptanceRule):
    """Accept a drafted token that is among the target's k most likely ones: the baseline that AutoJudge is compared with.

    a(x) = 1 where fewer than k tokens have a higher p than x (a tie goes to the lower id), else strict; r = norm((p − q)⁺)
    (Garipov et al., §4.1, huggingface.co/papers/2504.20039). Neutral: k = 0, and in greedy decoding k = 1.
    """

    k: int
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_int("TopK.k", self.k, 0)

    def ranks(self, block: Block) -> torch.Tensor:
        """How many tokens the target prefers to each drafted one, (B, γ)."""
        assert block.scores is not None, "the target has not seen this block yet"
        scores = block.scores[:, : block.tokens.shape[1]]  # (B, γ, V)
        mine, ids = block.of_tokens(scores)[..., None], torch.arange(scores.shape[-1], device=scores.device)
        ahead = (scores > mine) | ((scores == mine) & (ids < block.tokens[..., None]))
        return ahead.sum(dim=-1)

    def matches(self, block: Block) -> torch.Tensor:
        return self.ranks(block) < self.k

    def probability(self, block: Block) -> torch.Tensor:
        return super().probability(block).masked_fill(self.ranks(block) < self.k, 1.0)


@dataclass(frozen=True, eq=False)
class Judge(AcceptanceRule):
    """AutoJudge's rule: a token that strict acceptance would reject is kept if a trained head finds it unimportant.

    a(x) = 1 where P(important) < `threshold`, else min(1, p/q); r = norm((p − q)⁺) (Garipov et al., §3.3,
    huggingface.co/papers/2504.20039). The head sees all drafted tokens of a round in one product, so nothing has to be
    fetched from the device to learn which ones strict acceptance would reject; only there does its word count.
    Neutral: threshold 0. With 1 every token is kept.

    Args:
        head (`Head`): of polarity "important", from `hf-lossy fit autojudge`.
        threshold: None takes the head's own, chosen on held-out problems (for a recall of 90 % of the important tokens).
    """

    head: Head
    threshold: float | None = None
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.head, Head):
            raise TypeError(f"Judge.head: expected a Head, got {type(self.head).__name__}")
        if self.head.config.polarity != "important":
            raise ValueError(
                f"Judge needs a head that says P(important), this one says P({self.head.config.polarity}): use it with Sprinter, "
                "or train one with hf-lossy fit autojudge"
            )
        if self.head.config.features.model == "companion":
            raise ValueError("Judge: a head that reads a companion has no companion here")
        if self.threshold is None:
            own = self.head.config.metrics.get("threshold")
            if own is None:
                raise ValueError(
                    "this head names no threshold of its own: choose one from 0 (strict) to 1, AutoJudge(head, threshold)"
                )
            object.__setattr__(self, "threshold", own)
        check_number("Judge.threshold", self.threshold, 0.0, 1.0)

    def _key(self) -> tuple[str, FeatureSpec, float | None]:
        return self.head.digest, self.features, self.threshold

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Judge) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.head.config.features

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        """P(important) < threshold, (B, γ, H) → (B, γ) bool. In log-odds: a sigmoid that rounds to 1 would never pass."""
        t, logit = self.threshold, self.head.logit(features)
        assert t is not None
        if t == 1:
            return ~logit.isnan()
        return logit < (math.log(t / (1 - t)) if t else -math.inf)

    def matches(self, block: Block) -> torch.Tensor:
        return self._judged(block) | super().matches(block)

    def probability(self, block: Block) -> torch.Tensor:
        return super().probability(block).masked_fill(self._judged(block), 1.0)

    @staticmethod
    def _judged(block: Block) -> torch.Tensor:
        if block.judged is None:
            assert block.tokens.shape[1] == 0, "the head has not been asked about this block yet"
            return torch.zeros_like(block.tokens, dtype=torch.bool)
        return block.judged


def decide(rule: AcceptanceRule, block: Block) -> Verdict:
    """Accept a prefix of each row's kept tokens and choose the token after it.

    The coins are drawn before the rule is asked, so two rules with one seed see the same coins and a looser rule accepts
    a superset. A lossy rule takes the union with strict acceptance.
    """
    strict = Strict()
    gamma = block.tokens.shape[1]
    kept = block.drafted if block.kept is None else block.kept
    if block.sampling:
        coins = torch.rand(block.tokens.shape, device=block.tokens.device)
        by_strict = coins < strict.probability(block)
        by_rule = by_strict if rule.lossless else by_strict | (coins < rule.probability(block))
    else:
        by_strict = strict.matches(block)
        by_rule = by_strict if rule.lossless else by_strict | rule.matches(block)

    inside = torch.arange(gamma, device=kept.device) < kept[:, None]  # (B, γ)
    runs = (by_rule & inside).long().cumprod(dim=1)  # (B, γ) 1 up to the first rejection
    accepted = runs.sum(dim=1)
    lossy = runs.bool() & ~by_strict
    unseen = rule.unseen(block)
    unseen = None if unseen is None else unseen & runs.bool()

    rows = torch.arange(kept.shape[0], device=kept.device)
    if not block.sampling:
        return Verdict(accepted, block.best[rows, accepted], lossy, unseen)
    if gamma == 0:
        return Verdict(accepted, draw(block.p[:, 0]), lossy, unseen)
    law, at, rejected = block.p[rows, accepted], accepted.clamp(max=gamma - 1), accepted < kept
    residual = rule.correction(block, at)
    if block.considered is not None:
        # A filter that looked at the drafted token itself: r = norm(p − v·min(p, q)), at a token that it dropped as well.
        assert block.q is not None
        either = torch.minimum(block.p[rows, at], block.q[rows, at])
        residual, rejected = residual + either.masked_fill(block.considered(at), 0.0), accepted < block.drafted
    # Rounding can leave a residual of all zeros where p ≈ q; the token is then drawn from p, as it would be with exact numbers.
    use = rejected & (residual.sum(dim=1) > 0)
    return Verdict(accepted, draw(torch.where(use[:, None], residual, law)), lossy, unseen)


RULES: dict[str, type[AcceptanceRule]] = {
    "strict": Strict,
    "all_but_last": AllButLast,
    "top_k": TopK,
    "judge": Judge,
}
