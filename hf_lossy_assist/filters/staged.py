"""Staged speculation: an intermediate model verifies the draft first, and the target verifies what that leaves.

Spector & Ré, "Accelerating LLM Inference with Staged Speculative Decoding" (huggingface.co/papers/2308.04623), without their tree:
one of the baselines of SV's paper.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..registry import register_filter
from ..round import Draft, Selection, Verified
from ..rules import RuleRun, Strict, accept
from ..rules.accepting import Randomness
from .companion import WithCompanion


@dataclass(frozen=True, eq=False)
class Staged(WithCompanion):
    """Strict acceptance of the drafted tokens against `companion`; its first correction takes a drafted token's place.

    What is left was drawn from the companion's distributions c, so the target verifies it with q = c. Whether a place is left depends on
    the places before it alone, so the output has the target's distribution. Lossless; neutral: the draft itself as companion.
    """

    companion: Any = field(repr=False)

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: Randomness) -> Selection:
        gamma = draft.gamma
        if companion is None or gamma == 0:
            return Selection(draft, draft.lengths, companion=companion)
        inner = Verified(Selection(draft, draft.lengths), companion.log())
        verdict = accept(RuleRun(Strict()), inner, randomness)
        at, rejected = verdict.accepted, verdict.accepted < draft.lengths  # (B,) each
        place = at.clamp(max=gamma - 1)[:, None]
        token = torch.where(rejected[:, None], verdict.token[:, None], draft.tokens.gather(1, place))
        corrected = replace(draft, tokens=draft.tokens.scatter(1, place, token), probs=companion[:, :gamma])
        return Selection(
            corrected,
            torch.minimum(at + 1, draft.lengths),
            companion=companion,
            replaced=torch.where(rejected, at, gamma),
        )


register_filter(
    "staged", Staged, paper="2308.04623", example={"companion": "folder or org/name"},
    summary="Strict acceptance of the drafted tokens against `companion`.",
)  # fmt: skip
