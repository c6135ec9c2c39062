"""Verify filters: how many drafted tokens of each row go to the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..registry import NoDeepCopy, register_filter, set_base
from ..round import Draft, Selection
from ..rules.acceptance import RandomSource


@dataclass(frozen=True)
class VerifyFilter(NoDeepCopy):
    """The base of verify filters, which decide after drafting and before the target runs. `VerifyAll` is the neutral one."""

    lossless: ClassVar[bool] = True
    # Whether dropping a token may depend on the token itself, not only on those before it. The correction is then re-weighted.
    depends_on_token: ClassVar[bool] = False
    joint: ClassVar[bool] = False  # weighs the rows of a batch against each other

    def companion_for(self, target: Any) -> Any:
        """Return the model whose distributions the filter reads; None: it reads none."""
        return None

    def check(self, target: Any, draft: Any, tokenizer: Any = None, longest: int = 0) -> None:
        """Refuse models that it was not made for, or drafts of up to `longest` tokens."""

    def check_decoding(self, decoding: Mapping[str, Any]) -> None:
        """Warn of sampling settings that it was not made for."""

    def reads_companion(self, rows: int) -> bool:
        """Return whether the companion runs in a batch of `rows` rows."""
        return False

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        """Select what to send to the target.

        Args:
            companion: its distributions at each drafted position and the one after, (B, γ + 1, V) float32; None: it did not run.
            randomness: for filters that draw tokens; numbers that nothing else in the round uses.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method select(draft, companion, randomness)")


@dataclass(frozen=True)
class VerifyAll(VerifyFilter):
    """Every drafted token is verified."""

    def select(self, draft: Draft, companion: torch.Tensor | None, randomness: RandomSource) -> Selection:
        return Selection(draft, draft.lengths, sends_all=True, companion=companion)


set_base("filter", VerifyFilter)
register_filter("all", VerifyAll)
