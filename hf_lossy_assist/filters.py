"""Verify filters: how many drafted tokens of each row go to the target."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .block import Block


@dataclass(frozen=True)
class VerifyFilter:
    """Decides after drafting and before the target runs. `VerifyAll` is the neutral one."""

    lossless: ClassVar[bool] = True

    def __call__(self, block: Block) -> torch.Tensor:
        """The number of drafted tokens of each row to verify, (B,) int64, at most `block.drafted`."""
        raise NotImplementedError


@dataclass(frozen=True)
class VerifyAll(VerifyFilter):
    """Every drafted token is verified."""

    def __call__(self, block: Block) -> torch.Tensor:
        return block.drafted


FILTERS: dict[str, type[VerifyFilter]] = {"all": VerifyAll}
