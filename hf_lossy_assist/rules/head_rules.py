"""Rules with hidden states, or with a stop that reads them: SPRINTER, AutoJudge, and a quantile gate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from ..artifacts.features import FeatureSpec, FeatureTap
from ..artifacts.head import Head
from ..models.introspection import device_of
from ..registry import register_rule
from ..round import Verified
from ..validation import check_int, check_number
from .base import AcceptanceRule


@dataclass(frozen=True)
class AllButLast(AcceptanceRule):
    """Accept all drafted tokens of a row unchecked except the last, which is verified strictly: SPRINTER's rule.

    a = 1 before the last drafted token, min(1, p/q) for it, r = norm((p − q)⁺) (Zhong et al., Algorithm 2,
    huggingface.co/papers/2502.04557). For draft stops that end with the doubtful token (`HeadStop`). Neutral: one drafted token a round.
    """

    trusts_stop: ClassVar[bool] = True

    def unchecked(self, verified: Verified) -> torch.Tensor:
        return torch.arange(verified.draft.gamma, device=verified.tokens.device) < verified.sent[:, None] - 1

    def matches(self, verified: Verified) -> torch.Tensor:
        return self.unchecked(verified) | super().matches(verified)

    def probability(self, verified: Verified) -> torch.Tensor:
        return super().probability(verified).masked_fill(self.unchecked(verified), 1.0)


@dataclass(frozen=True, eq=False)
class Judge(AcceptanceRule):
    """Keep a token that strict acceptance would reject if a trained head finds it unimportant: AutoJudge's rule.

    a(x) = 1 where P(important) < `threshold`, else min(1, p/q); r = norm((p − q)⁺) (Garipov et al., §3.3,
    huggingface.co/papers/2504.20039). The head reads all drafted tokens of a round, since finding the mismatches would need a device sync.
    Neutral: threshold 0. A threshold of 1 accepts every token.

    Args:
        head (`Head`): with polarity "important", from `hf-lossy fit autojudge`.
        threshold: None: the head's, chosen on held-out problems (for a recall of 90 % of the important tokens).
    """

    head: Head
    threshold: float | None = None

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
            if self.head.config.threshold is None:
                raise ValueError(
                    "this head names no threshold of its own: choose one from 0 (strict) to 1, AutoJudge(head, threshold)"
                )
            object.__setattr__(self, "threshold", self.head.config.threshold)
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
        if verified.head_accepts is None:
            if verified.draft.gamma:
                raise ValueError("Judge: the head has not been asked about these tokens (Verified.head_accepts)")
            return torch.zeros_like(verified.tokens, dtype=torch.bool)
        return verified.head_accepts


@dataclass(frozen=True)
class QuantileGate(AcceptanceRule):
    """Accept the longest prefix of a draft whose score exceeds a threshold, a quantile of scores of the target's texts.

    The score of a prefix is the mean cosine similarity between the target's hidden states (after the final norm) at neighbouring tokens.
    A prefix with a score above `threshold` is accepted, and so is what strict acceptance takes; r = norm((p − q)⁺). Prefix and quantile
    follow Kingetsu et al., "Look Before You Leap" (aclanthology.org/2026.eacl-long.367); the score is a different one, since only the
    abstract was available. A prefix of one token has no score. Neutral: threshold 1.
    """

    threshold: float
    features: ClassVar[FeatureSpec | None] = FeatureSpec(model="target", position="token")

    def __post_init__(self) -> None:
        check_number("QuantileGate.threshold", self.threshold, -1.0, 1.0)

    @classmethod
    def calibrated(
        cls, target: PreTrainedModel, texts: Iterable[torch.Tensor], quantile: float, length: int = 8
    ) -> "QuantileGate":
        """Return the gate that a share `1 − quantile` of the windows of the target's texts passes.

        Args:
            target: the Transformers model.
            texts: token ids generated by the target, (n,) int64 each. No labels are needed.
            quantile: of the scores, 0 to 1.
            length: tokens of a window, as many as a round drafts.

        Raises: `ValueError`, one line: no text has two tokens, or a number is out of range.
        """
        check_number("quantile", quantile, 0.0, 1.0)
        check_int("length", length, 2)
        assert cls.features is not None
        scores, tap = [], FeatureTap(target, cls.features)
        with torch.no_grad(), tap:
            for text in texts:
                target(text[None].to(device_of(target)))
                for window in tap.latest[0].split(length):
                    if len(window) > 1:
                        scores.append(prefix_scores(window[None])[0, -1])
        if not scores:
            raise ValueError("QuantileGate.calibrated: expected texts of at least two tokens, got none")
        return cls(float(torch.stack(scores).quantile(quantile).clamp(-1.0, 1.0)))

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        """Return which prefixes pass, at their last tokens, (B, γ, H) → (B, γ) bool."""
        return prefix_scores(features) > self.threshold

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        strict = super().accepts(verified, coins)
        if verified.draft.gamma == 0:
            return strict
        assert verified.head_accepts is not None, "the engine asks `judge` where a rule has features"
        passes = verified.head_accepts & verified.is_sent
        return strict | (passes.flip(1).cumsum(dim=1).flip(1) > 0)  # a prefix that ends here or later passes


def prefix_scores(states: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine similarity of neighbours in each prefix of (B, γ, H), (B, γ) float32; −inf for the first token."""
    states = states.float()
    cosines = torch.nn.functional.cosine_similarity(states[:, 1:], states[:, :-1], dim=-1).clamp(-1.0, 1.0)
    means = cosines.cumsum(dim=1) / torch.arange(1, cosines.shape[1] + 1, device=states.device)
    return torch.nn.functional.pad(means, (1, 0), value=float("-inf"))


register_rule(
    "all_but_last",
    AllButLast,
    guarantee="lossy",
    neutral={},
    neutral_text="one drafted token a round",
    paper="2502.04557",
    beside={"stop": {"name": "constant", "gamma": 1}},
)
register_rule(
    "judge",
    Judge,
    guarantee="lossy",
    neutral={"threshold": 0.0},
    paper="2504.20039",
    example={"head": "folder or org/name"},
    ladder=("threshold", (0.02, 0.05, 0.1, 0.2, 0.4)),
)
register_rule(
    "quantile_gate",
    QuantileGate,
    guarantee="lossy",
    neutral={"threshold": 1.0},
    paper="aclanthology.org/2026.eacl-long.367",
    example={"threshold": 0.5},
    ladder=("threshold", (0.99, 0.95, 0.9, 0.8)),
)
