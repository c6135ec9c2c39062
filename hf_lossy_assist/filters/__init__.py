"""Verify filters: how many drafted tokens of each row go to the target. `base` says what a filter answers; every other file holds one."""

from collections.abc import Mapping

from ..registry import Names
from .base import VerifyAll, VerifyFilter
from .companion import WithCompanion
from .staged import Staged
from .sv import Verification


__all__ = ["FILTERS", "Staged", "Verification", "VerifyAll", "VerifyFilter", "WithCompanion"]

FILTERS: Mapping[str, type[VerifyFilter]] = Names("filter")  # by name, as they register themselves
