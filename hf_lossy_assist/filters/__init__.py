"""Verify filters: how many drafted tokens of each row go to the target. `base` says what a filter answers; every other file holds one."""

from .base import VerifyAll, VerifyFilter
from .companion import WithCompanion
from .staged import Staged
from .sv import Verification


__all__ = ["FILTERS", "Staged", "Verification", "VerifyAll", "VerifyFilter", "WithCompanion"]

FILTERS: dict[str, type[VerifyFilter]] = {"all": VerifyAll, "sv": Verification, "staged": Staged}
