"""SV's verify filter: a companion model says which drafted tokens are worth the target's time.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328); the exact correction is ours (docs/explanation/sv-exactness.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from ..artifacts.sv_profile import Profile
from ..models.introspection import base_of
from ..registry import register_filter
from ..round import Draft, Selection
from ..rules.acceptance import RandomSource
from ..validation import check_flag, nearest
from .companion import CompanionFilter
from .goodput import Schedule, choose


EXACT = ("full", "prefix", "off")


@dataclass(frozen=True, eq=False)
class SVFilter(CompanionFilter):
    """Verify a row's i-th drafted token while that is expected to give more tokens a second (`scheduling`).

    Args:
        profile (`Profile`): from `hf-lossy profile`.
        companion (`PreTrainedModel` or `str`): the profile's own; see `CompanionFilter`.
        exact: how the output keeps the target's distribution in sampling. To drop x because of its own A and then draw from p would
            favour what is kept. "full": the correction is drawn from norm(p − v·min(p, q)), v(x) = 1 where x would have been
            verified. "prefix": a token is dropped for S and earlier tokens alone. "off": the paper's own form, **lossy** in
            sampling. Greedy decoding is lossless in each. With "full" each row of a batch has the target's distribution, but rows that shared
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
        super().__post_init__()
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
    def depends_on_token(self) -> bool:  # type: ignore[override]
        return self.exact != "prefix"

    def check(self, target: Any, draft: Any, tokenizer: Any = None, longest: int = 0) -> None:
        self.profile.check_length(longest)
        super().check(target, draft, tokenizer, longest)
        self.profile.check(target, draft, self.companion_for(base_of(target)), tokenizer)

    def check_decoding(self, decoding: Mapping[str, Any]) -> None:
        self.profile.check_decoding(decoding)

    def reads_companion(self, rows: int) -> bool:
        """Whether the companion runs in a batch of `rows` rows."""
        return not self.fallback or self.profile.worthwhile(rows)

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        if companion is None or draft.gamma == 0:
            return Selection(draft, draft.lengths, companion=companion)
        q = probs_of(draft)
        bins, (batch, gamma) = self.profile.bins, draft.tokens.shape
        s, a = similarity(draft, companion), acceptance(draft, companion)  # (B, γ) each
        cell = bins.of_s(s)
        by_s, table = bins.tables(cell.device)
        accept = by_s[cell] if self.exact == "prefix" else table[cell, bins.of_a(cell, a[..., None])[..., 0]]
        accept = accept.masked_fill(torch.arange(gamma, device=cell.device) >= draft.lengths[:, None], 0.0)
        going = int((draft.lengths > 0).sum())
        # What the round costs must be known before it: how much was drafted in the end says something about the tokens themselves.
        seconds = self.profile.latency.of(batch, draft.planned)
        choice = choose(accept.cpu().numpy(), seconds, float(going if self.corrections else 0))
        would_verify = None
        if self.exact == "full" and draft.sampling:
            would_verify = partial(self._would_verify, companion, q, choice, cell)
        sent = torch.from_numpy(choice.kept).to(cell.device)
        return Selection(draft, sent, companion=companion, would_verify=would_verify)

    def _would_verify(
        self, companion: torch.Tensor, q: torch.Tensor, choice: Schedule, cell: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """v: which tokens would have been verified at place `at` (B,) of each row, (B, V) bool."""
        bins, rows = self.profile.bins, torch.arange(at.shape[0], device=at.device)
        here = cell[rows, at]  # (B,)
        verdicts = choice.would_verify(at.cpu().numpy(), bins.accept[here.cpu().numpy()])  # (B, L)
        a = ratio(companion[rows, at], q[rows, at])  # (B, V)
        return torch.from_numpy(verdicts).to(at.device).gather(1, bins.of_a(here, a))


def probs_of(draft: Draft) -> torch.Tensor:
    """q, (B, γ, V) float32. The engine has a draft keep it wherever a filter reads a companion."""
    if draft.probs is None:
        raise ValueError("a companion is compared with the draft's distributions, and this draft has none")
    return draft.probs


def similarity(draft: Draft, companion: torch.Tensor) -> torch.Tensor:
    """S = Σ min(q, c) at each drafted position, (B, γ) float32 (Definition D.1)."""
    return torch.minimum(probs_of(draft), companion[:, : draft.gamma]).sum(dim=-1)


def acceptance(draft: Draft, companion: torch.Tensor) -> torch.Tensor:
    """A = min(1, c(x)/q(x)) of each drafted token, (B, γ) float32 (Definition D.2)."""
    return ratio(draft.at_tokens(companion), draft.at_tokens(probs_of(draft)))


def ratio(c: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """min(1, c/q); where q = 0 nothing can be drafted and the value is not looked at."""
    return (c / q).nan_to_num(1.0).clamp(max=1.0)


register_filter(
    "sv", SVFilter, guarantee="depends", condition='lossless; lossy in sampling with exact="off"', neutral={"exact": "full"}, paper="2509.24328",
    summary="Verify a row's i-th drafted token while that is expected to give more tokens a second.",
    neutral_text='any but exact="off"', example={"profile": "folder or org/name", "companion": "folder or org/name"},
)  # fmt: skip
