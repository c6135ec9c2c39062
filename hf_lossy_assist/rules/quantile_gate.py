"""A rule that takes a draft as a whole, as far as the target's hidden states go on evenly."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureSpec, FeatureTap
from ..models.introspection import device_of
from ..registry import register_rule
from ..round import Verified
from ..validation import check_int, check_number
from .base import AcceptanceRule


@dataclass(frozen=True)
class QuantileGate(AcceptanceRule):
    """Accept the longest prefix of a draft whose score passes a threshold that is a quantile of scores of the target's own texts.

    The score of a prefix is the mean cosine between the target's hidden states at neighbouring tokens of it (after the final norm), and it
    must be above `threshold`; what strict acceptance takes is taken, too; r = norm((p − q)⁺). The prefix and the quantile are those of
    Kingetsu et al., "Look Before You Leap" (EACL 2026, aclanthology.org/2026.eacl-long.367). Its score is a geometry of hidden states too,
    but not this one: we know it from its abstract alone. A prefix of one token has no score. Neutral: threshold 1.
    """

    threshold: float
    lossless: ClassVar[bool] = False
    features: ClassVar[FeatureSpec | None] = FeatureSpec(model="target", position="token")

    def __post_init__(self) -> None:
        check_number("QuantileGate.threshold", self.threshold, -1.0, 1.0)

    @classmethod
    def calibrated(
        cls, target: Any, texts: Iterable[torch.Tensor], quantile: float, length: int = 8
    ) -> "QuantileGate":
        """The gate that `1 − quantile` of the target's own windows pass.

        Args:
            target: the Transformers model.
            texts: token ids that the target wrote, (n,) int64 each. No labels are needed.
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
        """Which prefixes pass, (B, γ, H) → (B, γ) bool, each at its last token."""
        return prefix_scores(features) > self.threshold

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        own = super().accepts(verified, coins)
        if verified.draft.gamma == 0:
            return own
        assert verified.head_accepts is not None, "the engine asks `judge` where a rule has features"
        passes = verified.head_accepts & verified.is_sent
        return own | (passes.flip(1).cumsum(dim=1).flip(1) > 0)  # a longer prefix passes


def prefix_scores(states: torch.Tensor) -> torch.Tensor:
    """The mean cosine of neighbours in each prefix of (B, γ, H), (B, γ) float32; −inf for the first, which has no neighbour."""
    states = states.float()
    cosines = torch.nn.functional.cosine_similarity(states[:, 1:], states[:, :-1], dim=-1).clamp(-1.0, 1.0)
    means = cosines.cumsum(dim=1) / torch.arange(1, cosines.shape[1] + 1, device=states.device)
    return torch.nn.functional.pad(means, (1, 0), value=float("-inf"))


register_rule(
    "quantile_gate", QuantileGate, guarantee="lossy", neutral={"threshold": 1.0}, paper="aclanthology.org/2026.eacl-long.367",
    summary="Accept the longest prefix of a draft whose hidden states go on as evenly as a quantile of the target's own texts.",
    example={"threshold": 0.5},
    ladder=("threshold", (0.99, 0.95, 0.9, 0.8)),
)  # fmt: skip
