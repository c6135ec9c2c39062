"""Rules with hidden states, or with a stop that reads them: SPRINTER and AutoJudge."""

import math
from typing import ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..artifacts.head import Head
from ..registry.frozen import Share
from ..round import Verified
from .base import AcceptanceRule


class AllButLast(
    AcceptanceRule,
    name="all_but_last",
    neutral={},
    neutral_text="one drafted token a round",
    paper="2502.04557",
    beside={"stop": {"name": "constant", "gamma": 1}},
):
    """Accept all drafted tokens of a row unchecked except the last, which is verified strictly: SPRINTER's rule.

    a = 1 before the last drafted token, min(1, p/q) for it, r = norm((p − q)⁺) (Zhong et al., Algorithm 2,
    huggingface.co/papers/2502.04557). For draft stops that end with the doubtful token.
    """

    trusts_stop: ClassVar[bool] = True

    def unchecked(self, verified: Verified) -> torch.Tensor:
        return torch.arange(verified.draft.gamma, device=verified.tokens.device) < verified.sent[:, None] - 1

    def matches(self, verified: Verified) -> torch.Tensor:
        return self.unchecked(verified) | super().matches(verified)

    def probability(self, verified: Verified) -> torch.Tensor:
        return super().probability(verified).masked_fill(self.unchecked(verified), 1.0)


class Judge(
    AcceptanceRule,
    eq=False,
    name="judge",
    neutral={"threshold": 0.0},
    paper="2504.20039",
    example={"head": "folder or org/name"},
    ladder=("threshold", (0.02, 0.05, 0.1, 0.2, 0.4)),
):
    """Keep a token that strict acceptance would reject if a trained head finds it unimportant: AutoJudge's rule.

    a(x) = 1 where P(important) < `threshold`, else min(1, p/q); r = norm((p − q)⁺) (Garipov et al., §3.3,
    huggingface.co/papers/2504.20039). The head reads all drafted tokens of a round, since finding the mismatches would need a device sync.
    A threshold of 1 accepts every token.

    Args:
        head (`Head`): with polarity "important", from `hf-lossy fit autojudge`.
        threshold: None: the head's, chosen on held-out problems (for a recall of 90 % of the important tokens).
    """

    head: Head
    threshold: Share | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.config.polarity != "important":
            raise ValueError(
                f"Judge needs a head that says P(important), this one says P({self.head.config.polarity}): use it with Sprinter, "
                "or train one with hf-lossy fit autojudge"
            )
        if self.head.config.features.model == "companion":
            raise ValueError("Judge: a head that reads a companion has no companion here")
        if self.threshold is None:
            object.__setattr__(self, "threshold", self.head.config.threshold)
            if self.threshold is None:
                raise ValueError("Judge: this head names no threshold: choose one from 0 (strict) to 1")

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
        """Return where P(important) < threshold, (B, γ, H) → (B, γ) bool. Uses log-odds, since a sigmoid may round to 1."""
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
        if verified.draft.gamma == 0:
            return torch.zeros_like(verified.tokens, dtype=torch.bool)
        assert verified.head_accepts is not None, "the head has not been asked"
        return verified.head_accepts
