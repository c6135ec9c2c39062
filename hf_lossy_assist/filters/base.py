"""Verify filters: how many drafted tokens of each row go to the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..registry import register_filter
from ..round import Block


@dataclass(frozen=True)
class VerifyFilter:
    """Decides after drafting and before the target runs. `VerifyAll` is the neutral one."""

    lossless: ClassVar[bool] = True
    selective: ClassVar[bool] = False  # may drop a token for its own sake, and not only for what stands before it

    joint: ClassVar[bool] = False  # weighs the rows of a batch against each other

    def observer(self, target: Any) -> Any:
        """The model whose laws it reads (`block.companion`); None: it reads none."""
        return None

    def check(self, target: Any, draft: Any, tokenizer: Any = None, longest: int = 0) -> None:
        """Refuse models that it was not made for, or drafts of up to `longest` tokens."""

    def check_decoding(self, decoding: Mapping[str, Any]) -> None:
        """Warn of sampling settings (`laws.decoding_at`) that it was not made for."""

    def observes(self, rows: int) -> bool:
        """Whether the companion is asked in a batch of so many rows."""
        return False

    def __call__(self, block: Block) -> torch.Tensor:
        """The number of drafted tokens of each row to verify, (B,) int64, at most `block.drafted`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method __call__(block)")


@dataclass(frozen=True)
class VerifyAll(VerifyFilter):
    """Every drafted token is verified."""

    def __call__(self, block: Block) -> torch.Tensor:
        return block.drafted


register_filter(
    "all", VerifyAll,
    summary="Every drafted token is verified.",
)  # fmt: skip
