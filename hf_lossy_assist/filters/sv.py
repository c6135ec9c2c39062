"""SV's verify filter: a companion model says which drafted tokens are worth the target's time.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328); the exact correction is ours (docs/explanation/sv-exactness.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from ..artifacts.profile import Profile
from ..models.inspect import base_of
from ..registry import register_filter
from ..round import Block
from ..validation import check_flag, nearest
from .companion import WithCompanion
from .scheduling import Choice, choose


EXACT = ("full", "prefix", "off")


@dataclass(frozen=True, eq=False)
class Verification(WithCompanion):
    """Verify a row's i-th drafted token while that is expected to give more tokens a second (`scheduling`).

    Args:
        profile (`Profile`): from `hf-lossy profile`.
        companion (`PreTrainedModel` or `str`): the profile's own; see `WithCompanion`.
        exact: how the output keeps the target's law in sampling. To drop x because of its own A and then draw from p would
            favour what is kept. "full": the correction is drawn from norm(p − v·min(p, q)), v(x) = 1 where x would have been
            verified. "prefix": a token is dropped for S and earlier tokens alone. "off": the paper's own form, **lossy** in
            sampling. Greedy decoding is lossless in each. With "full" each row of a batch has the target's law, but rows that shared
            rounds are not quite independent of each other; with "prefix" they are.
        corrections: count the token that every round gives as well; False is the paper's goodput.
        fallback: no companion and no filter in batches where the profile says that they would not pay.
    """

    profile: Profile
    companion: Any = field(repr=False)  # a model's repr has many lines
    exact: str = "full"
    corrections: bool = True
    fallback: bool = True
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.profile, Profile):
            raise TypeError(f"Verification.profile: expected a Profile, got {type(self.profile).__name__}")
        if self.exact not in EXACT:
            raise ValueError(f"Verification: {nearest('exact', str(self.exact), EXACT)}")
        check_flag("Verification.corrections", self.corrections)
        check_flag("Verification.fallback", self.fallback)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.exact != "off"

    @property
    def selective(self) -> bool:  # type: ignore[override]
        return self.exact != "prefix"

    def check(self, target: Any, draft: Any, tokenizer: Any = None, longest: int = 0) -> None:
        self.profile.check_length(longest)
        super().check(target, draft, tokenizer, longest)
        self.profile.check(target, draft, self.observer(base_of(target)), tokenizer)

    def check_decoding(self, decoding: Mapping[str, Any]) -> None:
        self.profile.check_decoding(decoding)

    def observes(self, rows: int) -> bool:
        """Whether the companion is asked in a batch of so many rows."""
        return not self.fallback or self.profile.worthwhile(rows)

    def __call__(self, block: Block) -> torch.Tensor:
        if block.companion is None or block.tokens.shape[1] == 0:
            return block.drafted
        assert block.laws is not None
        bins, (batch, gamma) = self.profile.bins, block.tokens.shape
        s, a = similarity(block), acceptance(block)  # (B, γ) each
        cell = bins.of_s(s)
        by_s, table = bins.tables(cell.device)
        accept = by_s[cell] if self.exact == "prefix" else table[cell, bins.of_a(cell, a[..., None])[..., 0]]
        accept = accept.masked_fill(torch.arange(gamma, device=cell.device) >= block.drafted[:, None], 0.0)
        going = int((block.drafted > 0).sum())
        # What the round costs must be known before it: how much was drafted in the end says something about the tokens themselves.
        seconds = self.profile.latency.of(batch, gamma if block.planned is None else block.planned)
        choice = choose(accept.cpu().numpy(), seconds, float(going if self.corrections else 0))
        if self.exact == "full" and block.sampling:
            block.considered = partial(self._considered, block, choice, cell)
        return torch.from_numpy(choice.kept).to(cell.device)

    def _considered(self, block: Block, choice: Choice, cell: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """v: which tokens would have been verified at place `at` (B,) of each row, (B, V) bool."""
        assert block.companion is not None and block.laws is not None
        bins, rows = self.profile.bins, torch.arange(at.shape[0], device=at.device)
        here = cell[rows, at]  # (B,)
        verdicts = choice.would_verify(at.cpu().numpy(), bins.accept[here.cpu().numpy()])  # (B, L)
        a = ratio(block.companion[rows, at], block.laws[rows, at])  # (B, V)
        return torch.from_numpy(verdicts).to(at.device).gather(1, bins.of_a(here, a))


def similarity(block: Block) -> torch.Tensor:
    """S = Σ min(q, c) at each drafted position, (B, γ) float32 (Definition D.1)."""
    assert block.laws is not None and block.companion is not None
    return torch.minimum(block.laws, block.companion[:, : block.tokens.shape[1]]).sum(dim=-1)


def acceptance(block: Block) -> torch.Tensor:
    """A = min(1, c(x)/q(x)) of each drafted token, (B, γ) float32 (Definition D.2)."""
    assert block.laws is not None and block.companion is not None
    return ratio(block.of_tokens(block.companion), block.of_tokens(block.laws))


def ratio(c: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """min(1, c/q); where q = 0 nothing can be drafted and the value is not looked at."""
    return (c / q).nan_to_num(1.0).clamp(max=1.0)


register_filter(
    "sv", Verification, guarantee="depends", condition='lossless; lossy in sampling with exact="off"', neutral={"exact": "full"}, paper="2509.24328",
    summary="Verify a row's i-th drafted token while that is expected to give more tokens a second.",
    neutral_text='any but exact="off"', example={"profile": "folder or org/name", "companion": "folder or org/name"},
)  # fmt: skip
