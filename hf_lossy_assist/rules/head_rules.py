"""The rules of the papers that train a head: SPRINTER's, which trusts a stop, and AutoJudge's, which asks a judge."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..artifacts.head import Head
from ..registry import register_rule
from ..round import Verified
from ..validation import check_number
from .base import AcceptanceRule


@dataclass(frozen=True)
class AllButLast(AcceptanceRule):
    """SPRINTER's rule: a row's drafted tokens are accepted unchecked, all but the last, which is verified strictly.

    a = 1 before the last drafted token, min(1, p/q) for it, r = norm((p − q)⁺) (Zhong et al., Algorithm 2,
    huggingface.co/papers/2502.04557). Meant for a draft stop that says when to doubt (`HeadStop`): the last token is then
    the doubted one. Neutral: one drafted token a round.
    """

    lossless: ClassVar[bool] = False
    trusts_stop: ClassVar[bool] = True

    def unchecked(self, verified: Verified) -> torch.Tensor:
        return torch.arange(verified.draft.gamma, device=verified.tokens.device) < verified.sent[:, None] - 1

    def matches(self, verified: Verified) -> torch.Tensor:
        return self.unchecked(verified) | super().matches(verified)

    def probability(self, verified: Verified) -> torch.Tensor:
        return super().probability(verified).masked_fill(self.unchecked(verified), 1.0)


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
            own = self.head.config.threshold
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

    def matches(self, verified: Verified) -> torch.Tensor:
        return self._judged(verified) | super().matches(verified)

    def probability(self, verified: Verified) -> torch.Tensor:
        return super().probability(verified).masked_fill(self._judged(verified), 1.0)

    @staticmethod
    def _judged(verified: Verified) -> torch.Tensor:
        if verified.head_accepts is None:
            if verified.draft.gamma:
                raise ValueError("Judge: the head has not been asked about these tokens (Verified.head_accepts)")
            return torch.zeros_like(verified.tokens, dtype=torch.bool)
        return verified.head_accepts


register_rule(
    "all_but_last", AllButLast, guarantee="lossy", neutral={}, neutral_text="one drafted token a round", paper="2502.04557",
    summary="SPRINTER's rule: a row's drafted tokens are accepted unchecked, all but the last, and that one strictly.",
    beside={"stop": {"name": "constant", "gamma": 1}},
)  # fmt: skip
register_rule(
    "judge", Judge, guarantee="lossy", neutral={"threshold": 0.0}, paper="2504.20039",
    summary="AutoJudge's rule: a token that strict acceptance would reject is kept if a trained head finds it unimportant.",
    example={"head": "folder or org/name"},
    ladder=("threshold", (0.02, 0.05, 0.1, 0.2, 0.4)),
)  # fmt: skip
