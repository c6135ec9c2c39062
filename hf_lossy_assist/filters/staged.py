"""Staged speculation: an intermediate model verifies the draft first, and the target verifies what that leaves.

Spector & Ré, "Accelerating LLM Inference with Staged Speculative Decoding" (huggingface.co/papers/2308.04623), without their tree:
one of the baselines of SV's paper.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..registry import register_filter
from ..round import Block
from ..rules import Strict, decide
from .companion import WithCompanion


@dataclass(frozen=True, eq=False)
class Staged(WithCompanion):
    """Strict acceptance of the drafted tokens against `companion`; its first correction takes a drafted token's place.

    What is left was drawn from the companion's laws c, so the target verifies it with q = c. Whether a place is left depends on
    the places before it alone, so the output's law is the target's. Lossless; neutral: the draft itself as companion.
    """

    companion: Any = field(repr=False)

    def __call__(self, block: Block) -> torch.Tensor:
        gamma = block.tokens.shape[1]
        if block.companion is None or gamma == 0:
            return block.drafted
        inner = Block(block.tokens, block.drafted, block.q, block.sampling, scores=block.companion.log())
        verdict = decide(Strict(), inner)
        at, refused = verdict.accepted, verdict.accepted < block.drafted  # (B,) each
        place = at.clamp(max=gamma - 1)[:, None]
        own = torch.where(refused[:, None], verdict.token[:, None], block.tokens.gather(1, place))
        block.tokens = block.tokens.scatter(1, place, own)
        block.laws = block.companion[:, :gamma]
        block.q = block.laws if block.sampling else None
        block.replaced = torch.where(refused, at, gamma)
        return torch.minimum(at + 1, block.drafted)


register_filter(
    "staged", Staged, paper="2308.04623", example={"companion": "folder or org/name"},
    summary="Strict acceptance of the drafted tokens against `companion`.",
)  # fmt: skip
