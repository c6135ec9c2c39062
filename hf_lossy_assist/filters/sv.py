"""The verify filter of SV: a companion model predicts which drafted tokens are worth verifying.

Kim et al., "Speculative Verification" (huggingface.co/papers/2509.24328); the exact correction is ours (docs/explanation/sv-exactness.md).
"""

from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.sv_profile import Profile
from ..models.introspection import base_of
from ..round import Draft, Selection
from ..rules.acceptance import RandomSource
from .base import CompanionFilter
from .goodput import Schedule, acceptance, choose, probs_of, ratio, similarity


Exactness = Literal["full", "prefix", "off"]


class SVFilter(
    CompanionFilter,
    name="sv",
    condition='lossless; lossy in sampling with exact="off"',
    neutral={"exact": "full"},
    paper="2509.24328",
    neutral_text='any but exact="off"',
    example={"profile": "folder or org/name", "companion": "folder or org/name"},
):
    """Verify a row's i-th drafted token if that is expected to give more tokens per second.

    Args:
        profile (`Profile`): from `hf-lossy profile`.
        companion (`PreTrainedModel` or `str`): the model that the profile was made with; see `CompanionFilter`.
        exact: how sampling stays exact, since dropping x because of its A and then drawing from p would favour the other tokens. "full":
            the correction is drawn from norm(p − v·min(p, q)), v(x) = 1 where x would have been verified; rows of a common round are not
            quite independent of each other. "prefix": a token is dropped only for S and earlier tokens. "off": the paper's form,
            **lossy** in sampling. Greedy decoding is lossless in each.
        corrections: also count the token that every round gives; False is the paper's goodput.
        fallback: run without companion and filter in batches for which the profile predicts that they do not pay.
    """

    profile: Profile
    companion: PreTrainedModel = field(repr=False)  # a model's repr has many lines
    exact: Exactness = "full"
    corrections: bool = True
    fallback: bool = True
    joint: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.exact != "off"

    @property
    def depends_on_token(self) -> bool:  # type: ignore[override]
        return self.exact != "prefix"

    def check(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        longest: int = 0,
    ) -> None:
        self.profile.check_length(longest)
        super().check(target, draft, tokenizer, longest)
        self.profile.check(target, draft, self.companion_for(base_of(target)), tokenizer)

    def check_decoding(self, decoding: Mapping[str, object]) -> None:
        self.profile.check_decoding(decoding)

    def reads_companion(self, rows: int) -> bool:
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
        # The cost must be known before the round: the final draft length depends on the tokens themselves.
        seconds = self.profile.latency.of(batch, draft.planned)
        sure = float((draft.lengths > 0).sum()) if self.corrections else 0.0
        choice = choose(accept.cpu().numpy(), seconds, sure)
        would_verify = None
        if self.exact == "full" and draft.sampling:
            would_verify = partial(self._would_verify, companion, q, choice, cell)
        sent = torch.from_numpy(choice.counts).to(cell.device)
        return Selection(draft, sent, companion=companion, would_verify=would_verify)

    def _would_verify(
        self, companion: torch.Tensor, q: torch.Tensor, choice: Schedule, cell: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return v: which tokens would have been verified at position `at` (B,) of each row, (B, V) bool."""
        bins, rows = self.profile.bins, torch.arange(at.shape[0], device=at.device)
        cells = cell[rows, at]  # (B,)
        verified = choice.would_verify(at.cpu().numpy(), bins.accept[cells.cpu().numpy()])  # (B, L)
        a = ratio(companion[rows, at], q[rows, at])  # (B, V)
        return torch.from_numpy(verified).to(at.device).gather(1, bins.of_a(cells, a))
